"""Low-rank adapters on a frozen language model: trained in stages, resumed and exported; some stages train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import further

from mpirun.checkpoint.pretrained import Pretrained
from schedgen.cli.main import main as command

PROGRAM = Path(__file__).parents[2] / "helpers" / "programs" / "train_adapters.py"
SCHEMES = {"1f1b": ["1f1b"], "fsdp": ["fsdp", "--shards", "4"]}
TRAINED = ("1f1b", *further("fsdp"))
EXPORTED = (*TRAINED, *(f"resumed-{scheme}" for scheme in TRAINED))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, launch) -> Path:
    """Where programs/train_adapters.py has trained."""
    folder = tmp_path_factory.mktemp("adapters")
    for name, scheme in SCHEMES.items():
        sizes = ["--workers", "4", "--stages", "4", "--microbatches", "4"]
        assert command(["compile", *scheme, *sizes, "-o", str(folder / f"{name}.json")]) == 0
    done = launch(4, folder, *TRAINED, program=(str(PROGRAM),))
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def found(folder) -> dict[str, Any]:
    """The results that it wrote."""
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("scheme", TRAINED)
def test_adapters_train_with_the_bits_of_one_process(found, scheme):
    of_scheme = found[scheme]
    assert [len(names) for names in of_scheme["names"]] == [0, 4, 0, 4]
    assert of_scheme["numbers"] == found["1f1b"]["numbers"]
    verified, lines = of_scheme["verified"]
    assert verified and lines.count("by at most 0\n") == 3
    for numbers, expected in zip(of_scheme["numbers"], found["plain"], strict=True):
        assert numbers == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("scheme", TRAINED)
def test_a_checkpoint_is_gone_on_from_under_another_scheme(found, scheme):
    assert found[scheme]["resumed"] == found[scheme]["numbers"][2:] and len(found[scheme]["resumed"]) == 2


@pytest.mark.parametrize("name", EXPORTED)
def test_what_is_exported_is_the_whole_network_with_its_base_unchanged(folder, found, name):
    compared = found[f"exported {name}"]
    # Adapters have moved by 1e-2 a step; the base is bfloat16, so its sums, in another order, are not quite the same.
    assert compared["lacks"] == ["lm_head.weight"] and compared["frozen"] and compared["off"] < 1e-3
    saved, first = Pretrained(folder / name), Pretrained(folder / "1f1b")
    assert set(saved.names) == set(first.names)
    values, expected = saved(saved.names), first(saved.names)
    assert all(torch.equal(value, expected[key]) for key, value in values.items())
    types = {key: value.dtype for key, value in values.items()}
    adapters = {key for key, dtype in types.items() if dtype is torch.float32}
    assert adapters == {key for names in found["1f1b"]["names"] for key in names}
    assert set(types.values()) == {torch.float32, torch.bfloat16}
