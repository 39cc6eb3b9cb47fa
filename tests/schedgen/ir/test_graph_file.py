"""compile --graph: what a schedule must know of a model."""

import json

import pytest

from schedgen.ir.file import parse

GRAPH = {"stages": 4, "edges": [[0, 1], [0, 3], [1, 2], [2, 3]], "per_consumer": [0], "tied": [[0, 3]]}


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"edges": [[0, 1]]}, "no stage reads stage 1, and the loss reads the last, 3, alone: join it with stage 2"),
        ({"edges": [[1, 0]]}, "edge (1, 0) does not go from a smaller to a larger stage"),
        ({"edges": 3}, "edges and tied should be lists"),
        ({"edges": [[0, 9]]}, "it names stage 9, which is not in 0..3"),
        ({"per_consumer": [1]}, "per_consumer: the output of stage 1 is not read by several stages"),
        ({"per_consumer": 0}, "edges and tied should be lists"),
        ({"tied": [[0, "a"]]}, "edges and tied should be lists"),
        ({"tied": [[0, 4]]}, "it names stage 4, which is not in 0..3"),
        ({"tied": [[-1, 2]]}, "it names stage -1, which is not in 0..3"),
        ({"tied": [[2, 2]]}, "tied 2,2: a tie is two or more different stages in 0..3"),
        ({"stages": 0}, "stages should be a whole number of at least 1"),
        ({"replicated": [4]}, "it names stage 4, which is not in 0..3"),
        ({"replicated": 0}, "per_consumer and replicated lists of stages"),
        ({"layers": [1, 2]}, "layers has 2 numbers, but there are 4 stages"),
        ({"layers": [1, 2, 0, 1]}, "layers should be a list of whole numbers of at least 1"),
    ],
)
def test_a_wrong_graph_is_one_sentence(run, refused, tmp_path, change, words):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH | change))
    out = run("compile", "1f1b", "--graph", tmp_path / "graph.json", "--microbatches", 4, "-o", "-")
    assert words in refused(out, 2)


def test_stages_must_be_the_graphs(run, refused, tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    command = ("compile", "1f1b", "--graph", tmp_path / "graph.json", "--microbatches", 4, "-o", "-")
    assert "graph.json has 4" in refused(run(*command, "--stages", 3), 2)
    assert "graph.json has 4 stages that are no chain" in refused(run(*command, "--stages", 2), 2)
    (tmp_path / "graph.json").write_text("{")
    assert "not JSON" in refused(run(*command), 1)
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH | {"what": 1}))
    assert "should be an object with stages, and perhaps edges" in refused(run(*command), 1)
    assert "none: No such file" in refused(run(*command[:3], tmp_path / "none", *command[4:]), 1)


def test_each_stage_of_a_scheme_has_as_many_of_a_chain(run, refused, graph_file):
    command = ("compile", "1f1b", "--graph", graph_file(stages=8), "--microbatches", 4, "-o", "-")
    header = parse(run(*command, "--stages", 2).out, "-").header
    assert (header.workers, header.stages, header.scheme["substages"]) == (2, 8, 4)
    header = parse(run(*command).out, "-").header
    assert (header.workers, header.stages, header.scheme.get("substages")) == (8, 8, None)
    said = refused(run(*command, "--stages", 3), 2)
    assert said.endswith("model.graph has 8 stages, which is no multiple of the scheme's 3")


def test_a_graph_says_what_slices_compute_alike_and_how_many_layers_stages_have(run, graph_file):
    graph = graph_file(stages=4, edges=[[0, 1], [1, 2], [2, 3]], replicated=[0], layers=[3, 1, 1, 2])
    command = ("compile", "1f1b", "--graph", graph, "--stages", 2, "--microbatches", 4, "-o", "-")
    header = parse(run(*command, "--tensor", 2).out, "-").header
    assert header.tensor_parallel.replicated == (0, 3) and header.scheme["layers"] == [3, 1, 1, 2]
    assert parse(run(*command).out, "-").header.tensor_parallel.degree == 1


def test_a_graph_without_edges_leaves_a_scheme_its_own(run, graph_file, tmp_path):
    scheme = tmp_path / "mine.py"
    scheme.write_text("edges = [(0, 2), (1, 2)]\ndef w(s, b, d): return s, s\ndef n(s, b, d): return b\n")
    for graph, edges in (({}, ((0, 2), (1, 2))), ({"edges": [[0, 1], [1, 2]]}, ((0, 1), (1, 2)))):
        path = graph_file(stages=3, **graph)
        out = run("compile", scheme, "--graph", path, "--microbatches", 2, "-o", "-").out
        assert parse(out, "-").header.graph.edges == edges
