"""Lists on transports that deliver in order: verdicts beside all interleavings, repairs, communicators."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from compiled import compiled
from examples import examples
from in_order import CARRIERS, assigned, outcomes, shuffled
from processes import ROOT
from torch_schedules import deferred_receives

from schedgen.checker import check, check_but_waits
from schedgen.checker.deadlock import rule_4
from schedgen.checker.proof import Proof
from schedgen.checker.repair import repair
from schedgen.ir.transport import NAMES, Transport, read_transport
from schedgen.schemes.scheme import Sizes
from schedgen.util.errors import RefusedFile

LISTS = examples(120, as_asked=True)  # random lists
IN_ORDER = [f"in-order:{name}{batch}" for name in NAMES for batch in ("", "+batch")]
LIST = ROOT / "tests" / "data" / "torch-172668.csv"


def verdict(program, transport: Transport | None) -> int:
    """The rule that the order of messages breaks; 0: none."""
    try:
        rule_4(Proof(program, "program", transport))
    except RefusedFile as error:
        return error.rule or 0
    return 0


def test_verdicts_are_those_of_all_interleavings_and_repairs_are_safe():
    too_many = 0  # of the 12 LISTS verdicts
    for seed in range(LISTS):
        random = Random(seed)
        program = shuffled(random)
        cases = [(read_transport(name), CARRIERS[name[9:].removesuffix("+batch")]) for name in IN_ORDER]
        check_but_waits(program, "program", cases[0][0])
        cases.append((None, None))  # MPI, where messages have tags
        for transport, carrier in [*cases, assigned(random, program)]:
            try:
                (found,) = outcomes(program, carrier, bool(transport and transport.batch))
            except OverflowError:
                too_many += 1
                continue
            rule = 3 if found.swapped else 0 if found.ends else 4
            if transport is None:  # rule 3 has each kind of message in order, which tags would not need
                assert verdict(program, None) in (rule, 3), seed
                continue
            assert verdict(program, transport) == rule, (seed, transport)
            repaired = repair(program, "program", transport)
            assert rule == 0 or len(repaired.moved), (seed, transport)
            assert rule or transport.batch or not len(repaired.moved), (seed, transport)
            assert verdict(repaired.program, transport) == 0, (seed, transport)
            if transport.assigned:
                check(repaired.program, transport=transport)
    assert too_many <= LISTS / 2


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_compiled_for_a_transport_is_safe_there_and_on_mpi(name):
    transport = read_transport(name)
    for scheme, sizes in (("zb-v", Sizes(4, 6)), ("fsdp", Sizes(4, 6, 4)), ("lpp", Sizes(4, 6, 4, groups=2))):
        program = compiled(scheme, sizes, in_order=transport)
        check(program, transport=transport)
        check(program)
        default = compiled(scheme, sizes)
        again = repair(default, "default", transport).program
        check(again, transport=transport)
        check(again)


@pytest.fixture
def deferred(tmp_path: Path) -> Path:
    """The list of pytorch 172668 with every RECV directly before its job, as the thread's patch had it."""
    return deferred_receives(LIST, tmp_path / "deferred.csv")


def test_the_list_of_pytorch_172668_hangs_as_reported_and_is_repaired(deferred, tmp_path, run):
    for name in IN_ORDER:
        assert run("check", LIST, "--transport", name)[0] == 0
    code, _, error = run("check", deferred, "--transport", "in-order:pair")
    assert code == 1
    assert (
        'rank 0, cell 6: {"op": "SEND", "buf": "x.0.1", "to": 1}: waits forever, in a cycle with rank 1, cell 5'
        in error
    )
    code, out, _ = run("repair", deferred, "--transport", "in-order:pair", "-o", tmp_path / "safe.json")
    assert code == 0 and "safe on in-order:pair" in out and ": now behind rank 0, cell" in out
    assert run("check", tmp_path / "safe.json", "--transport", "in-order:pair")[0] == 0
    code, out, error = run("repair", deferred, "--fewest", "-o", tmp_path / "two.json")
    assert (code, out) == (0, "") and "2 communicators, the fewest" in error
    assert run("check", deferred, "--transport", f"in-order:{tmp_path / 'two.json'}")[0] == 0


def test_a_swap_is_named_with_both_buffers(tmp_path, run):
    assert run(*f"compile fsdp --stages 4 --workers 4 --microbatches 8 -o {tmp_path / 'fsdp.json'}".split())[0] == 0
    code, _, error = run("check", tmp_path / "fsdp.json", "--transport", "in-order:edge")
    assert code == 1
    assert '"RECV", "buf": "dw.2", "from": 0}: this meets the SEND of another buffer, line ' in error
    assert '{"op": "SEND", "buf": "w.0", "to": 2}, as 2 of ' in error
    assert "(rule 3: every SEND has its RECV or FETCH_W, on in-order:edge)" in error


@pytest.mark.parametrize(
    "text, words",
    [
        ("[", "not JSON"),
        ("[]", "a list of 1 to 4096 communicators"),
        ('[{"edges": [[0]]}]', 'entry 0: a communicator is {"edges": '),
        ('[{}, {"edges": [[0, 1, "q"]]}]', "entry 1: a communicator is "),
        ('[{"kinds": ["x"]}]', "entry 0: a communicator is "),
        ('[{"edges": [[0, 1]]}]', 'no communicator carries this: rank 0: {"op": "RECV", "buf": "x.1.0", "from": 1}'),
    ],
)
def test_a_bad_assignment_is_refused(tmp_path, run, text, words):
    (tmp_path / "bad.json").write_text(text)
    code, out, error = run("check", LIST, "--transport", f"in-order:{tmp_path / 'bad.json'}")
    assert (code, out) == (1, "") and words in error and error.count("\n") == 1
