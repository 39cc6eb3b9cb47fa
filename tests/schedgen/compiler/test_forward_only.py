"""Forward-only lists: what they contain, that they are proved and run, and that commands know them."""

import json

import pytest
from compiled import compiled, sizes_of
from drawn_programs import programs
from edited_programs import comes_back, runs_with, written
from examples import examples
from hypothesis import given, settings

from schedgen import Options, check, compile, forward_list
from schedgen.ir.instructions import FORWARD_OPS, Op
from schedgen.schemes import SCHEMES, load


def both(scheme, sizes, **options):
    """The forwards of a training program by `forward_list`, and by the compiler."""
    return forward_list(compile(scheme, sizes, Options(**options))), compile(
        scheme, sizes, Options(**options, forward=True)
    )


def forwards_of(program):
    """By rank, its forwards in their order."""
    return [
        [(i.stage, i.mb) for i in program.instructions(rank) if i.op == Op.FWD]
        for rank in range(program.header.workers)
    ]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_forwards_of_a_strict_scheme_are_those_of_its_training(name, tensor):
    sizes = sizes_of(name)._replace(workers=4 * tensor)
    scheme = load(name, sizes, tensor)
    if scheme.mode == "strict" and scheme.updates == "flush":
        listed, program = both(scheme, sizes, tensor=tensor)
        assert written(listed) == written(program)


@given(training=programs(without=("forward",)))
@settings(max_examples=examples(80))
def test_the_forwards_of_any_program_run_in_its_order_on_its_workers(training):
    program = forward_list(training)
    runs_with(check(program), program)
    comes_back(program)
    assert forwards_of(program) == forwards_of(training)
    assert set(program.rows.op.tolist()) <= set(FORWARD_OPS)
    old, new = training.header, program.header
    assert new.directions == ("F",) and (new.compute[0] == old.compute[0]).all()
    assert (new.owners, new.shard_owners, new.graph) == (old.owners, old.shard_owners, old.graph)
    assert new.tensor_parallel == old.tensor_parallel


def test_an_output_is_freed_where_the_loss_has_been_read():
    program = forward_list(compiled("1f1b", 4, 8))
    ops = [(Op(i.op), i.buffer if i.op == Op.FREE else "") for i in program.instructions(3)]
    for b, at in enumerate(at for at, (op, _) in enumerate(ops) if op == Op.FWD):
        assert ops[at + 1 : at + 3] == [(Op.FREE, f"x.2.{b}"), (Op.FREE, f"x.3.{b}")]
    memory = check(program)
    assert memory.saved.max() == 0
    longer = check(forward_list(compiled("1f1b", 4, 16)))
    assert memory.activation.tolist() == longer.activation.tolist() == [3, 6, 6, 4]


# Commands that read schedules read these lists


@pytest.fixture
def path(run, tmp_path):
    path = tmp_path / "forward.json"
    options = ("--stages", 4, "--microbatches", 4, "--workers", 2, "--forward", "-o", path)
    assert run("compile", "fsdp", *options) == (0, "", "")
    return path


def test_stats_have_no_nonsense(run, path):
    numbers = json.loads(run("stats", path, "--json").out)
    assert set(numbers["bounds"]) == {"work", "critical_path", "ends"} and max(numbers["bounds"].values()) <= 8
    assert 0 <= numbers["gap"] < 1
    assert numbers["latency"] == 8
    assert "nan" not in run("stats", path).out
    assert run("check", path).out.endswith("every forward once, no deadlock\n")


@pytest.mark.parametrize(
    "command",
    ["simulate PATH", "simulate PATH --cost F=2,B=4", "simulate PATH --alpha 0.1 --beta 0.1", "draw PATH",
     "draw PATH -o OUT.html", "draw PATH -o OUT.svg", "simulate PATH --trace OUT",
     "export PATH --to chakra -o OUT"],
)  # fmt: skip
def test_other_commands_know_it(run, path, tmp_path, command):
    result = run(*command.replace("PATH", str(path)).replace("OUT", str(tmp_path / "out")).split())
    assert result.code == 0 and "nan" not in result.out, result
