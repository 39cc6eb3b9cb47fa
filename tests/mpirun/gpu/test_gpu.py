"""Checks that need a GPU, each in a test of its own: `make test-gpu`. Four ranks share the available GPUs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil

import pytest
import torch
from golden_cases import EVERY, MODEL

from schedgen.cli.main import main as schedgen

GPT = ("--model", "mpirun.examples.gpt:tiny", "--device", "cuda")
SHORT = ("--steps", 3, "--verify")
UCX_WHEEL = "libucx" in os.environ.get("LD_LIBRARY_PATH", "")  # by `make GPU=1`


def test_messages_through_host_memory(passes):
    """Ranks that share GPUs say so."""
    out, gpus = passes(*GPT, *SHORT, "--gpu-messages", "host"), torch.cuda.device_count()
    assert "pinned host memory" in out
    assert gpus >= 4 or f", 4 ranks on {gpus};" in out


SIDE = """
import torch
from mpi4py import MPI
from mpirun.comm.device import choose_device
choose_device(MPI.COMM_WORLD, "cuda", "host")
def check(_):
    assert torch.cuda.current_stream() != torch.cuda.default_stream()
x = torch.ones(3, device="cuda", requires_grad=True)
y = x * 2
y.register_hook(check)
y.sum().backward()
check(None)
"""


def test_kernels_forward_and_backward_are_not_in_the_stream_that_waits_for_all_others(launch):
    done = launch(2, program=("-c", SIDE))
    assert done.code == 0, done.err


@pytest.mark.parametrize("name", EVERY)
def test_every_golden_schedule_gives_the_gradient_of_one_gpu(passes, name):
    passes("--model", MODEL[name], "--device", "cuda", *SHORT, schedule=name)


def test_direct_messages_work_or_are_refused_in_a_sentence(launch, traces):
    """MPI's wheel alone: the variables that `make GPU=1` sets are reset."""
    without = {"LD_LIBRARY_PATH": "", "OMPI_MCA_pml": "^ucx", "MPIR_CVAR_NOLOCAL": "0"} if UCX_WHEEL else {}
    done = launch(4, traces / "1f1b.json", *GPT, *SHORT, "--gpu-messages", "direct", env=without)
    if done.code:
        assert re.search(r"MPI died on GPU memory: take gpu messages host|gpu messages direct: MPI did not", done.err)
    else:
        assert "MPI takes GPU tensors as they are" in done.out


def test_direct_messages_by_the_wheel_of_ucx(launch, traces):
    """UCX's log names the transport."""
    if not UCX_WHEEL:
        pytest.skip("the wheel of UCX is not in use: make test-gpu GPU=1")
    env = {"UCX_LOG_LEVEL": "info"}
    done = launch(4, traces / "1f1b.json", *GPT, *SHORT, "--gpu-messages", "direct", env=env)
    assert done.code == 0, done.out + done.err
    assert "MPI takes GPU tensors as they are" in done.out
    assert re.search("cuda_(copy|ipc)", done.out + done.err)


def test_kernels_of_several_ranks_at_once_by_mps(passes, mps):
    passes(*GPT, *SHORT, env=mps)


# Executes mpirun under compute-sanitizer, which checks every memory access of kernels.
CHECKED = """
import os, sys
checker = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
checker += ["--report-api-errors", "no"]  # a library may ask the driver for what it has not
os.execvp(checker[0], [*checker, sys.executable, "-m", "mpirun", *sys.argv[1:]])
"""


def test_no_kernel_touches_memory_that_is_not_its_own(passes, two_ranks):
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("there is no compute-sanitizer")
    out = passes(*GPT, "--steps", 1, schedule=two_ranks, ranks=2, program=("-c", CHECKED), limit=1200)
    assert out.count("ERROR SUMMARY: 0 errors") == 2, out


LATE = ("programs/late_kernels.py",)


def test_late_kernels_change_nothing(passes):
    passes(*GPT, *SHORT, program=LATE)


def test_without_marks_late_kernels_are_seen(launch, traces):
    """Otherwise the test before shows nothing."""
    done = launch(4, traces / "1f1b.json", *GPT, *SHORT, program=LATE, env={"UNMARKED": "1"})
    assert done.code == 1
    assert re.search(r"verify: failed| is (nan|-?inf)", done.out + done.err), done.out + done.err


def test_canonical_runs_have_the_bits_of_one_process_and_of_each_other(inside, traces):
    run = {"arguments": [traces / "1f1b.json", *GPT, *SHORT, "--canonical"]}
    first, second = inside(4, [run, run])
    assert first.differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert first.weights == second.weights


def test_mixed_precision(passes):
    passes(*GPT, *SHORT, "--autocast", "bf16")


def test_mixed_precision_of_stages_that_end_in_layer_norm(passes):
    """Under autocast a LayerNorm gives float32 on a GPU, and bf16 on a CPU."""
    passes("--model", "models_for_tests:ends_in_norms", "--device", "cuda", *SHORT, "--autocast", "bf16")


@pytest.mark.parametrize("model", ["dropping", "dropping_by_host"])
def test_forwards_that_are_done_again_draw_the_same_numbers(passes, compiled, model):
    schedule = compiled("1f1b", stages=4, microbatches=8, recompute="all")
    passes("--model", f"models_for_tests:{model}", "--device", "cuda", *SHORT, schedule=schedule)


def test_a_run_goes_on_from_gpus_to_cpus_and_back(passes, tmp_path):
    options = GPT[:2]
    for steps, device in ((2, "cuda"), (4, "cpu"), (6, "cuda")):
        resume = ["--resume", tmp_path] if steps > 2 else []
        out = passes(*options, "--device", device, "--steps", steps, "--save", tmp_path, *resume)
        assert f"step {steps}" in out


# An operation that makes the host wait for the GPU is an error in every instruction but NORM.
NO_WAITS = """
import sys
from unittest import mock
import torch
from mpirun.cli.main import main
from mpirun.engine.core.interpreter import Interpreter
from schedgen.ir.instructions import Op
prepare = Interpreter.__init__
def prepared(self, *arguments):
    prepare(self, *arguments)
    def strict(act):
        def run():
            torch.cuda.set_sync_debug_mode("error" if self.warm else "default")
            act()
            torch.cuda.set_sync_debug_mode("default")
        return run
    pairs = zip(self.code, self.context.instructions, strict=True)
    self.code = [act if i.op == Op.NORM else strict(act) for act, i in pairs]
with mock.patch.object(Interpreter, "__init__", prepared):
    sys.exit(main(sys.argv[1:]))
"""


def test_only_norm_makes_the_host_wait(passes):
    passes(*GPT, "--steps", 4, program=("-c", NO_WAITS))


CUDA = ["--device", "cuda", "--steps", 6, "--canonical"]


def alike(inside, schedule, model, *ways, more=()):
    """Assert that six steps, of which graphs replay two, have the same bits however their kernels are started."""
    arguments = [schedule, "--model", model, *CUDA, *more]
    runs = inside(4, [{"arguments": [*arguments, *way]} for way in ([], *ways)])
    assert [run.code for run in runs] == [0] * len(runs), "".join(run.out for run in runs)
    assert len({run.weights for run in runs}) == 1
    assert not any("computed without" in run.out for run in runs)


@pytest.mark.parametrize("name", EVERY)
def test_graphs_and_streams_that_wait_for_words_change_no_bit(inside, traces, name):
    """With direct messages where MPI supports them, else through host memory. Words begin with the second step."""
    alike(
        inside, traces / f"{name}.json", MODEL[name], ["--graphs"], ["--stream-words"], ["--stream-words", "--graphs"]
    )


@pytest.mark.parametrize("model", ["dropping", "normed"])
def test_replayed_forwards_that_are_done_again_draw_the_same_numbers(inside, compiled, model):
    """Dropout, whose generators a graph has registered, and running statistics."""
    schedule = compiled("1f1b", stages=4, microbatches=8, recompute="all")
    alike(inside, schedule, f"models_for_tests:{model}", ["--graphs"])


@pytest.mark.parametrize("more", [(), ("--autocast", "bf16")], ids=["float32", "bf16"])
def test_transformers_are_replayed(inside, traces, more):
    """Attention has kernels of its own for each of these."""
    alike(inside, traces / "1f1b.json", GPT[1], ["--graphs"], more=more)


# Beyond the golden schedules: random draws with split backwards, several consumers and outputs, slices, views.
FAN = {"stages": 4, "edges": [[0, 1], [0, 2], [0, 3], [1, 3], [2, 3]]}
OTHERS = {
    "dropping": ("zb-h1", {"stages": 4}),
    "fan": ("1f1b", {"graph": FAN}),
    "strided": ("zb-h1", {"stages": 4}),
    "normed": ("gpipe", {"stages": 4, "recompute": "all"}),
    "tuples": ("1f1b", {"stages": 4}),
    "pair": ("1f1b", {"stages": 1, "tensor": 4, "graph": {"stages": 2}}),
    "four_types": ("fsdp", {"stages": 4, "shards": 4}),
    "lstm": ("1f1b", {"stages": 4}),
}


@pytest.mark.parametrize("model", OTHERS)
def test_models_of_all_kinds_have_the_same_bits_however_kernels_are_started(inside, compiled, model):
    scheme, sizes = OTHERS[model]
    schedule = compiled(scheme, microbatches=8, workers=4, **sizes)
    ways = (["--verify"], ["--graphs"], ["--graphs", "--stream-words"])
    runs = inside(4, [{"arguments": [schedule, "--model", f"models_for_tests:{model}", *CUDA, *way]} for way in ways])
    assert [run.code for run in runs] == [0, 0, 0], "".join(run.out for run in runs)
    assert len({run.weights for run in runs}) == 1


# Eight steps of an Engine, the last of each epoch with padding; evaluation, prediction and a trace between them.
ENGINE = """
import hashlib, itertools, json, sys
import torch
from mpi4py import MPI
import mpirun
from mpirun.examples import digits
from torch.utils.data import TensorDataset
scheme, how, folder = sys.argv[1:]
draw = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(35, 1, 8, 8, generator=draw), torch.randint(10, (35,), generator=draw))
torch.manual_seed(0)
options = {"graphs": "graphs" in how, "stream_words": "words" in how, "canonical": True, "device": "cuda"}
cut = lambda stages: mpirun.split(digits.resnet(2), torch.zeros(4, 1, 8, 8), stages=stages)
said = []
with mpirun.Engine(scheme, cut, loss=digits.loss, stages=4, microbatches=4, **options) as run:
    loader, tests = (run.loader(data, microbatch_size=4, shuffle=shuffle) for shuffle in (True, False))
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), 8):
        if run.steps == 6:
            with run.trace(folder + "/trace.json"):
                said.append(run.step(batch).loss)
        else:
            said.append(run.step(batch).loss)
        if run.steps in (1, 5):
            evaluation = run.evaluate(tests)
            outputs = run.predict(tests)
            own = "" if outputs is None else hashlib.sha256(outputs.cpu().numpy().tobytes()).hexdigest()
            said += [evaluation.loss, evaluation.metrics["accuracy"], own]
    run.export(folder + "/exported")
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps(said))
    assert json.load(open(folder + "/trace.json"))["traceEvents"]
"""


@pytest.mark.parametrize("scheme", ["1f1b", "ddp", "zb-h1"])
def test_an_engine_trains_evaluates_and_exports_alike_however_kernels_are_started(launch, tmp_path, scheme):
    seen = []
    for how in ("launched", "graphs", "graphs, words"):
        (folder := tmp_path / how).mkdir()
        done = launch(4, scheme, how, folder, program=("-c", ENGINE))
        assert done.code == 0, done.out + done.err
        weights = [file.read_bytes() for file in sorted((folder / "exported").glob("*.safetensors"))]
        assert weights
        seen.append((done.out.splitlines()[-1], *weights))
    assert seen[0] == seen[1] == seen[2]


def test_memory_is_counted_and_what_the_allocator_keeps_is_said(passes):
    out = passes(*GPT, "--steps", 2, "--memory")
    peaks, reserved = (list(map(int, line.split(":")[-1].split())) for line in re.findall("^memory: .*$", out, re.M))
    assert len(peaks) == 4 and all(0 < peak <= kept for peak, kept in zip(peaks, reserved, strict=True))


def profile(launch, file, device="cuda", model="gpt"):
    """The profile of a tiny model in four stages."""
    options = ["--model", f"mpirun.examples.{model}:tiny", "--device", device]
    done = launch(4, "profile", *options, "--stages", 4, "-o", file)
    assert done.code == 0, done.err
    return json.loads(file.read_text())


def test_a_profile_is_of_messages_between_gpus(launch, tmp_path, record_property):
    """Faster than 1 GB a second, slower than memory."""
    beta = profile(launch, tmp_path / "profile.json")["beta"]
    record_property("GB/s", f"{1e-9 / beta:.1f}")
    assert 1e-13 < beta < 1e-9


def test_a_profile_counts_no_workspace_of_cublas_as_saved(launch, tmp_path, record_property):
    """A GPU saves what a CPU saves; its allocator rounds."""
    on_gpu, on_cpu = (profile(launch, tmp_path / name, name, "mlp") for name in ("cuda", "cpu"))
    for what in ("saved", "half"):
        record_property(what, max(on_gpu[what]))
        assert on_gpu[what] == pytest.approx(on_cpu[what], rel=0.1)


def test_no_rank_holds_more_than_predicted(launch, passes, traces, tmp_path, record_property):
    """Within 5 %, and two workspaces of cuBLAS: one of the forwards' thread, one of the backwards'."""
    profile(launch, tmp_path / "profile.json")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        arguments = ["stats", str(traces / "1f1b.json"), "--profile", str(tmp_path / "profile.json"), "--json"]
        assert schedgen(arguments) == 0
    predicted = [worker["peak_bytes"] for worker in json.loads(said.getvalue())["workers"]]
    out = passes(*GPT, "--steps", 2, "--memory")
    peaks = [int(peak) for peak in re.search("^memory: most bytes of tensors .*: ([0-9 ]+)$", out, re.M)[1].split()]
    for peak, limit in zip(peaks, predicted, strict=True):
        record_property("peak of predicted", f"{peak / limit:.2f}")
        assert 0.95 * limit <= peak <= 1.05 * limit + 2 * 2**25


@pytest.mark.parametrize(
    "trouble", ["raises_in_stage", "out_of_gpu_memory_in_stage", "bad_index_in_stage", "killed_in_stage"]
)
def test_trouble_ends_all_ranks_with_one_message(launch, traces, tmp_path, trouble):
    options = ["--model", f"models_for_tests:{trouble}", "--device", "cuda", "--steps", 3]
    done = launch(4, traces / "1f1b.json", *options, env={"TROUBLE_AT": str(tmp_path / "at"), "COLD_RANKS": "1"})
    assert done.code != 0 and len([line for line in done.ours if not line.startswith(" ")]) == 1, done.err
