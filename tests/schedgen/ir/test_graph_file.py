"""compile --graph: the edges of a model that is no chain."""

import json

import pytest

from schedgen.ir.file import parse

GRAPH = {"stages": 4, "edges": [[0, 1], [0, 3], [1, 2], [2, 3]], "apart": [0], "tied": [[0, 3]]}


def test_a_schedule_has_the_graphs_edges(run, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    for scheme in ("1f1b", "gpipe", "zb-h1", "fsdp", "lpp"):
        more = ("--groups", 2) if scheme == "lpp" else ()
        out = run("compile", scheme, "--graph", tmp_path / "graph.json", "--microbatches", 4, "--workers", 4, *more,
                  "-o", "-")  # fmt: skip
        assert out.code == 0, out.err
        header = parse(out.out, "-").header
        assert header.graph.edges == ((0, 1), (0, 3), (1, 2), (2, 3))
        assert (header.graph.per_consumer, header.tied, header.stages) == ((0,), ((0, 3),), 4)
        assert '"buf": "x.0.1.3"' in out.out or scheme == "fsdp"


def test_an_output_apart_or_not_is_said_by_its_name(run, judge, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    command = ("compile", "1f1b", "--graph", tmp_path / "graph.json", "--microbatches", 2, "-o", "-")
    file = json.loads(run(*command).out)
    assert judge(file)[0].code == 0
    for wrong, right in (("x.0.0", "x.0.0.3"), ("x.0.0.2", "x.0.0.3"), ("x.1.0.2", "x.1.0")):
        program = json.loads(json.dumps(file["programs"]).replace(f'"{right}"', f'"{wrong}"'))
        found, _ = judge({**file, "programs": program})
        assert found.code == 1 and f"{wrong} is asked for, but there is no such buffer (rule 2" in found.err
    del file["apart"]
    assert judge(file)[0].code == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edges": [[0, 1]]}, "the last stage, 3, alone must end in the loss"),
        ({"edges": [[1, 0]]}, "edge (1, 0) does not go from a smaller to a larger stage"),
        ({"edges": 3}, "edges and tied should be lists"),
        ({"edges": [[0, 9]]}, "it names a stage that is not in 0..3"),
        ({"apart": [1]}, "apart: the output of stage 1 is not read by several stages"),
        ({"apart": 0}, "edges and tied should be lists"),
        ({"tied": [[0, "a"]]}, "edges and tied should be lists"),
        ({"tied": [[2, 2]]}, "a tie is two or more different stages"),
        ({"stages": 0}, "stages should be a whole number of at least 1"),
        ({"what": 1}, "should be an object with stages and edges"),
    ],
)
def test_a_wrong_graph_is_one_sentence(run, refused, tmp_path, change, words):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH | change))
    out = run("compile", "1f1b", "--graph", tmp_path / "graph.json", "--microbatches", 4, "-o", "-")
    assert words in refused(out, 2)


def test_a_graph_of_one_stage_has_no_edges(run, tmp_path):
    (tmp_path / "graph.json").write_text('{"stages": 1}')
    assert run("compile", "gpipe", "--graph", tmp_path / "graph.json", "--microbatches", 4, "-o", "-").code == 0


def test_stages_must_be_the_graphs(run, refused, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    command = ("compile", "1f1b", "--graph", tmp_path / "graph.json", "--microbatches", 4, "-o", "-")
    assert "graph.json has 4" in refused(run(*command, "--stages", 3), 2)
    assert "--parts makes chains" in refused(run(*command, "--parts", 2), 2)
    (tmp_path / "graph.json").write_text("{")
    assert "not JSON" in refused(run(*command), 2)
    assert "none: No such file" in refused(run(*command[:3], tmp_path / "none", *command[4:]), 1)
