"""--graphs: jobs that are captured once and replayed give the bits of jobs that are launched kernel by kernel.

They are captured on the late device (helpers/programs/late_graphs.py), whose graphs keep addresses: a replay that reads
memory that has been freed since fails, and the memory of a freed tensor in the pool holds NaN.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from examples import further
from golden_cases import TRAINED, cases, ranks, schedule
from standing_launch import MAY_FAIL

from mpirun.comm.device import Device
from mpirun.engine.job_graphs import CaptureCheck

# Whole and split backwards; weights that are fetched, sharded or have versions; sums over tensor slices; several stages
# per rank.
CHOSEN = {"1f1b-tensor": "direct", "fsdp-sharded": "staged"}
CHOSEN |= further(("pipedream", "staged"), ("zb-v", "direct"))
CASES = cases(CHOSEN)
STEPS = 5  # one computed normally, two checked, one captured, one replayed
MLP = "models_for_graphs:mlp_of_four"
COMPUTE = ("FWD", "RECOMPUTE", "BWD", "BWD_I", "BWD_W")


def jobs(file) -> int:
    """The number of jobs of a schedule."""
    return sum(i["op"] in COMPUTE for rank in json.loads(file.read_text())["programs"] for i in rank)


def counts(captured: int, replayed: int) -> str:
    return f"graphs: {captured} captured, {replayed} replayed"


@pytest.fixture(scope="module")
def pairs(inside, text):
    """Runs of some arguments on the CPU, and with graphs on a late device."""

    def pairs(ranks, runs, *more, **requested):
        """`runs`: pairs of arguments and the path of messages. Returns the pairs of their results.

        `more`: options of mpirun on the late device alone.
        """
        requests = []
        for arguments, how in runs:
            arguments = ["--steps", STEPS, *arguments, "--text", text, "--canonical"]
            late = {"arguments": [*arguments, "--graphs", *more], "late": how, **requested}
            requests += [{"arguments": arguments}, late]
        results = inside(ranks, requests)
        return list(zip(results[::2], results[1::2], strict=True))

    return pairs


@pytest.fixture(scope="module")
def trained(pairs, compiled):
    """By case: the number of jobs of its schedule, and the results of its pair of runs; staged ones are by words."""
    results = {}
    for name, how in CASES:
        file = schedule(name, compiled, 4 if name == "fsdp-sharded" else 2)
        words = ["--stream-words"] if how == "staged" else []
        (pair,) = pairs(ranks(name), [([file, "--model", TRAINED[name]], how)], *words)
        results[name, how] = jobs(file), pair
    return results


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_replayed_jobs_give_the_bits_of_launched_ones(trained, case):
    """Every job is captured once, and replayed then and in each later step."""
    count, (eager, replayed) = trained[case]
    assert replayed.code == 0, replayed.out
    assert counts(count, (STEPS - 3) * count) in replayed.out and "computed without" not in replayed.out
    assert replayed.weights == eager.weights


# Random draws in recomputed forwards, running statistics, outputs with several consumers.
MODELS = {
    "models_for_tests:dropping": ({"recompute": "all"}, []),
    **dict(further(("models_for_tests:normed", ({"recompute": "all"}, [])))),
    "models_for_tests:fan": ({"graph": {"stages": 4, "edges": [[0, 1], [0, 2], [0, 3], [1, 3], [2, 3]]}}, []),
    "models_for_graphs:gpt_of_four": ({}, ["--clip", 1]),
}


@pytest.fixture(scope="module")
def modelled(pairs, compiled):
    runs = []
    for model, (options, arguments) in MODELS.items():
        schedule = compiled("1f1b", **{"stages": 4, **options}, microbatches=2, workers=2)
        runs.append(([schedule, "--model", model, *arguments], "direct"))
    return dict(zip(MODELS, pairs(2, runs), strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_models_of_all_kinds_are_replayed(modelled, model):
    eager, replayed = modelled[model]
    again = 3 if "recompute" in MODELS[model][0] else 2
    count = again * 4 * 2
    assert replayed.code == 0, replayed.out
    assert counts(count, (STEPS - 3) * count) in replayed.out and "computed without" not in replayed.out
    assert replayed.weights == eager.weights


# Models in which one or two of four stages do what no graph can replay.
REFUSED = {
    "models_for_graphs:counts_forwards_and_reads_values": [
        "1 is computed without a graph: FWD: its operations change from one time to the next",
        "3 is computed without a graph: FWD: aten._local_scalar_dense.default makes the host wait for values",
    ]
}
REFUSED |= further(
    (
        "models_for_tests:dropping_by_host",
        ["1 is computed without a graph: FWD: aten.rand.default is computed on the host, or from host memory"],
    ),
    (
        "models_for_graphs:remembers_and_counts_values",
        [
            "1 is computed without a graph: FWD: its operations change from one time to the next",
            "3 is computed without a graph: FWD: aten.nonzero.default makes the host wait for values",
        ],
    ),
)


@pytest.fixture(scope="module")
def refused(pairs, compiled):
    schedule = compiled("1f1b", stages=4, microbatches=2, workers=2)
    runs = [([schedule, "--model", model], "direct") for model in REFUSED]
    return dict(zip(REFUSED, pairs(2, runs, waits=True), strict=True))


@pytest.mark.parametrize("model", REFUSED)
def test_a_stage_that_cannot_be_captured_is_computed_as_always_and_named(refused, model):
    eager, replayed = refused[model]
    lines = [f"graphs: stage {line}" for line in REFUSED[model]]
    assert [line for line in replayed.out.splitlines() if "computed without" in line] == lines
    count = (4 - len(lines)) * 4
    assert counts(count, (STEPS - 3) * count) in replayed.out
    assert replayed.code == 0
    # The late device seeds the generator of the CPU when its kernels run, too late for what the CPU draws.
    assert replayed.weights == eager.weights or model == "models_for_tests:dropping_by_host"


def test_a_rank_has_memory_for_the_microbatches_in_flight_and_not_for_all(inside, compiled, text):
    """And for a line of 512 bytes for each microbatch's loss, which NORM reads."""
    runs = []
    for microbatches in (3, 6):
        schedule = compiled("1f1b", stages=2, microbatches=microbatches)
        arguments = [schedule, "--model", MLP, "--text", text, "--steps", 4, "--graphs"]
        runs.append({"arguments": arguments, "late": "direct"})
    few, many = (
        [int(size) for size in run.out.splitlines()[-1].removeprefix("pool: ").split()] for run in inside(2, runs)
    )
    assert many[0] == few[0] and 0 <= many[1] - few[1] <= 3 * 512


# Faults of graphs (helpers/programs/broken_graphs.py), and a model that shows each.
BREAKS = {
    "what a graph reads is taken to stay where it was": MLP,
    "layers draw in every step what they drew in the first": "models_for_graphs:dropping_of_four",
    "what a graph gives does not hold its memory": MLP,
}
BREAKS |= further(
    ("what a graph reads is not copied", MLP),
    ("nobody looks at operations", "models_for_graphs:counts_forwards"),
    ("what a graph reads is filled in deterministic mode", MLP),
)


@pytest.fixture(scope="module")
def broken(in_one_launch, compiled, text):
    """Runs a model with a fault of graphs; returns how the run ends. No other test is in the launch, which may fail."""
    schedule = compiled("1f1b", stages=2, microbatches=4)

    @cache
    def end(model: str, how: str | None) -> tuple[int, str] | str:
        arguments = [schedule, "--model", model, "--text", text, "--steps", STEPS, "--canonical", "--graphs"]
        run = {"arguments": list(map(str, arguments)), "late": "direct", "break": how, "waits": True}
        try:
            ((code, _, weights),) = in_one_launch(2, [run], env=MAY_FAIL)
        except RuntimeError as error:
            assert str(error).startswith("the launch ended"), error
            return str(error)
        return code, weights

    return end


@pytest.mark.parametrize("name", BREAKS)
def test_graphs_that_are_broken_are_seen(broken, name):
    """Otherwise the other tests would show nothing."""
    whole, left_out = broken(BREAKS[name], None), broken(BREAKS[name], name)
    assert whole[0] == 0 and left_out != whole, (whole, left_out)


def test_a_capture_that_fails_though_nothing_was_seen_ends_the_run_in_a_sentence(broken):
    sentence = (
        "graphs: FWD of stage 1 cannot be captured: RuntimeError: aten._local_scalar_dense.default is not permitted"
    )
    ended = broken("models_for_graphs:reads_values_later", None)
    assert f"RuntimeError: {sentence} while the stream is captured" in ended, ended


ON_LATE_DEVICES = """
sys.path.append("programs")
from unittest import mock
from late_device import Late
from models_for_graphs import mlp_of_four
tokens = torch.randint(256, (35, 17), generator=torch.Generator().manual_seed(0))
data = [(row[:-1], row[-1]) for row in tokens]
"""
WORDS = """
from mpirun.engine.core.interpreter import Interpreter
device, passes, execute = Late(direct=True, words=True), [], Interpreter.execute
def noted(self):
    passes.append(device.words is not None)
    execute(self)
with mock.patch("mpirun.engine.setup.choose_device", lambda *_: device), device.working():
    with mock.patch.object(Interpreter, "execute", noted):
        options = {"stages": 2, "microbatches": 2, "graphs": sys.argv[1] == "graphs"}
        with mpirun.Engine("1f1b", mlp_of_four(2), **options) as run:
            for batch in run.loader(data[:16], microbatch_size=1):
                run.step(batch)
sys.stdout.write(" ".join(map(str, passes)) + "\\n")
"""


@pytest.mark.parametrize(("how", "without"), [("launched", 1), ("graphs", 4)])
def test_words_are_used_once_nothing_is_allocated(scripts, how, without):
    """Not in a first step, nor while graphs are captured: allocations would wait for streams that wait for words."""
    (done,) = scripts(2, [[ON_LATE_DEVICES + WORDS, how]])
    assert done.out.splitlines() == [" ".join(["False"] * without + ["True"] * (8 - without))] * 2, done.err


class Meta(Device):
    """Tensors without memory in place of those of a GPU, whose attention kernels a CPU does not have."""

    kind = "meta"


def test_attention_is_captured_though_its_seed_is_the_hosts():
    """Outside of a capture, the seed of its dropout is a number in host memory, which its backward reads."""
    q, seed, aten = torch.empty(2, 4, 16, 8, device="meta"), torch.tensor(3), torch.ops.aten
    with CaptureCheck(Meta(), [q]) as forward:
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1, True)
    with CaptureCheck(Meta(), None) as backward:
        given = (out, q, q, q, None, out, sums, seed, seed)
        aten._scaled_dot_product_efficient_attention_backward(*given, 0.1, [True, True, True, False], True)
    with CaptureCheck(Meta(), None) as other:
        aten.add(q, seed)
    assert forward.why is backward.why is None
    assert other.why == "aten.add.Tensor is computed on the host, or from host memory"


# Six steps of an Engine on a late device. The fifth has three samples of eight: a microbatch and a half are padding.
PADDED = """
import hashlib
from mpirun.engine.core.stage import LocalStage
scheme, graphs, words = sys.argv[1], "graphs" in sys.argv[2], "words" in sys.argv[2]
device, forward = Late(direct=True, words=words), LocalStage.forward
def launched(self, *arguments, **more):
    assert not graphs or device.words is None, "memory is allocated while streams wait for words"
    return forward(self, *arguments, **more)
choose = mock.patch("mpirun.engine.setup.choose_device", lambda *_: device)
with choose, mock.patch.object(LocalStage, "forward", launched), device.working():
    with mpirun.Engine(scheme, mlp_of_four(2), stages=2, microbatches=4, canonical=True, graphs=graphs) as run:
        loader = run.loader(data, microbatch_size=2, shuffle=True)
        losses = [run.step(batch).loss for batch in itertools.islice(itertools.chain(loader, loader), 6)]
        owned = [part for stage in run.session.interpreter.stages.values() for part in stage.owned.values()]
        own = hashlib.sha256(b"".join(part.cpu().numpy().tobytes() for part in owned)).hexdigest()
        everyone = MPI.COMM_WORLD.gather((own, device.pool.captures, device.pool.replays))
        if everyone:
            weights, captures, replays = zip(*everyone)
            print(losses, *weights, sum(captures), sum(replays), sep="\\n")
"""


@pytest.mark.parametrize("scheme", ["1f1b", *further("ddp")])
def test_microbatches_that_fit_no_graph_are_computed_as_always(scripts, scheme):
    """So are those of the last stage that are padded; the others are replayed, with another weight in such a step.

    With words, microbatches that are computed as always are ordered by events, because they allocate.
    """
    ways = ("as always", "graphs", "graphs, words")
    eager, *others = scripts(2, [[ON_LATE_DEVICES + PADDED, scheme, how] for how in ways])
    assert eager.code == 0, eager.err
    *same, _, _ = eager.out.splitlines()
    for replayed in others:
        assert replayed.code == 0, replayed.err
        *also, captures, replays = replayed.out.splitlines()
        assert len(same) == 3 and also == same
        # Of 4 jobs for each of 4 microbatches, 2 of them of the last stage, in 3 steps; 3 microbatches are padded.
        assert (int(captures), int(replays)) == (16, 3 * 16 - 6)
