"""traces/: the golden schedules are what the compiler writes today."""

import json
from pathlib import Path

import pytest
from golden_cases import ALIKE

from schedgen.cli.main import main

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("**/*.json"))


def test_every_scheme_has_a_golden_schedule() -> None:
    from schedgen.schemes import SCHEMES

    assert {json.loads(path.read_text())["scheme"]["name"] for path in TRACES} == set(SCHEMES)


@pytest.mark.parametrize("golden", TRACES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_golden_schedule_compiles_to_the_same_bytes(golden: Path, tmp_path: Path) -> None:
    header = json.loads(golden.read_text())
    scheme = header["scheme"]
    tensor = header.get("tensor", {"degree": 1, "replicated": []})
    graph = {"stages": scheme["stages"] // tensor["degree"], "replicated": tensor["replicated"]}
    if not tensor["replicated"]:  # else ties are between slices, and do not come from the model
        graph["tied"] = header["tied"]
    (tmp_path / "graph").write_text(json.dumps(graph))
    scheme["stages"] = graph["stages"] // scheme.pop("substages", 1)
    options = [
        f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in scheme.items()
        if key != "name"
    ]
    options += ["--forward"] * (list(header["order"]["cost"]) == ["F"])
    options += [f"--tensor={tensor['degree']}", f"--graph={tmp_path / 'graph'}"]
    assert main(["compile", scheme["name"], *options, "--output", str(tmp_path / "again.json")]) == 0
    assert (tmp_path / "again.json").read_bytes() == golden.read_bytes()


@pytest.mark.parametrize(("name", "other"), ALIKE.items())
def test_who_trains_by_the_one_has_trained_by_the_other(name: str, other: str) -> None:
    """All but the name of the scheme, and how its order was found, is the same."""
    one, two = (json.loads((TRACES[0].parent / f"{stem}.json").read_text()) for stem in (name, other))
    assert one.keys() == two.keys()
    assert {key for key in one if one[key] != two[key]} <= {"scheme", "order", "sha256"}
