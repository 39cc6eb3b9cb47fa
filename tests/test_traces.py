"""traces/: the golden schedules are what the compiler writes today."""

import json
from pathlib import Path

import pytest

from schedgen.cli.main import main

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("*.json"))


def test_every_scheme_has_a_golden_schedule() -> None:
    from schedgen.schemes import SCHEMES

    assert {json.loads(path.read_text())["scheme"]["name"] for path in TRACES} == set(SCHEMES)


@pytest.mark.parametrize("golden", TRACES, ids=lambda path: path.stem)
def test_a_golden_schedule_compiles_to_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    header = json.loads(golden.read_text())
    scheme = header["scheme"]
    tensor = header.get("tensor", {"degree": 1, "whole": []})
    shards = scheme.get("parts", 1) * tensor["degree"]
    scheme["stages"] //= shards
    options = [
        f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in scheme.items()
        if key != "name"
    ]
    if shards > 1:
        options += [f"--tensor={tensor['degree']}", f"--whole={','.join(map(str, tensor['whole']))}"]
    else:
        options += [f"--tied={','.join(map(str, stages))}" for stages in header["tied"]]
    assert main(["compile", scheme["name"], *options, "--output", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == golden.read_bytes()
