"""What only a GPU can show, one test a question: `make test-gpu`. Four ranks share the GPUs that there are.

None of these has run yet: no GPU was there when they were written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

TRACES = Path(__file__).parents[3] / "traces"
GOLDEN = sorted(path.stem for path in TRACES.glob("*.json"))
MODEL = dict.fromkeys(GOLDEN, "mpirun.examples.mlp:tiny") | {
    "1f1b-tied": "models_for_tests:gpt_tied",
    "1f1b-tensor": "models_for_tests:gpt_tensor",
}
GPT = ("--model", "mpirun.examples.gpt:tiny", "--device", "cuda")
SHORT = ("--steps", 3, "--verify")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")


@pytest.fixture
def passes(launch, traces):
    """A run of 1f1b on 4 ranks that ends well; what it prints."""

    def passes(*options: object, schedule: str = "1f1b", program=("-m", "mpirun")) -> str:
        done = launch(4, traces / f"{schedule}.json", *options, program=program)
        assert done.code == 0, done.out + done.err
        return done.out

    return passes


def test_messages_through_host_memory(passes):
    assert "pinned host memory" in passes(*GPT, *SHORT, "--gpu-messages", "host")


@pytest.mark.parametrize("name", GOLDEN)
def test_every_golden_schedule_gives_the_gradient_of_one_gpu(passes, name):
    passes("--model", MODEL[name], "--device", "cuda", *SHORT, schedule=name)


def test_direct_messages_work_or_are_refused_in_a_sentence(launch, traces):
    done = launch(4, traces / "1f1b.json", *GPT, *SHORT, "--gpu-messages", "direct")
    if done.code:
        assert re.search(r"MPI died on GPU memory: --gpu-messages host|--gpu-messages direct: MPI does not", done.err)
    else:
        assert "MPI takes GPU tensors as they are" in done.out


# Kernels late by 20 million cycles before every stage; and, where asked, transfers that do not wait for them.
LATE = """
import sys
from unittest import mock
import torch
from mpirun.comm.device import Cuda
from mpirun.cli.main import main
from mpirun.engine.stage import LocalStage
compute = LocalStage._compute
def late(self, *arguments):
    torch.cuda._sleep(20_000_000)
    return compute(self, *arguments)
with mock.patch.object(LocalStage, "_compute", late):
    with mock.patch.object(Cuda, "mark", (lambda self: None) if {unmarked} else Cuda.mark):
        sys.exit(main(sys.argv[1:]))
"""


def test_late_kernels_change_nothing(passes):
    passes(*GPT, *SHORT, program=("-c", LATE.format(unmarked=False)))


def test_without_marks_late_kernels_are_seen(launch, traces):
    """Otherwise the test before shows nothing."""
    done = launch(4, traces / "1f1b.json", *GPT, *SHORT, program=("-c", LATE.format(unmarked=True)))
    assert done.code != 0


def test_canonical_runs_have_the_bits_of_one_process_and_of_each_other(inside, traces):
    run = {"arguments": [traces / "1f1b.json", *GPT, *SHORT, "--canonical"]}
    first, second = inside(4, [run, run])
    assert first.differences == {"losses": 0, "gradients": 0, "parameters": 0}
    assert first.weights == second.weights


def test_mixed_precision(passes):
    passes(*GPT, *SHORT, "--autocast", "bf16")


def test_dropout_draws_the_same_numbers_again(passes):
    passes("--model", "models_for_tests:dropping", "--device", "cuda", *SHORT)


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
from mpirun.engine.interpreter import Interpreter
from schedgen.ir.instructions import Op
prepare = Interpreter.__init__
def prepared(self, *arguments):
    prepare(self, *arguments)
    def strict(act):
        def run():
            torch.cuda.set_sync_debug_mode("error" if self.timed else "default")
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


def test_memory_is_counted_and_what_the_allocator_keeps_is_said(passes):
    out = passes(*GPT, "--steps", 2, "--memory")
    peaks, reserved = (list(map(int, line.split(":")[-1].split())) for line in re.findall("^memory: .*$", out, re.M))
    assert len(peaks) == 4 and all(0 < peak <= kept for peak, kept in zip(peaks, reserved, strict=True))


def test_a_profile_is_of_messages_between_gpus(launch, tmp_path):
    """Faster than 1 GB a second, slower than memory."""
    done = launch(4, "profile", *GPT, "--stages", 4, "-o", tmp_path / "profile.json")
    assert done.code == 0, done.err
    assert 1e-13 < json.loads((tmp_path / "profile.json").read_text())["beta"] < 1e-9


@pytest.mark.parametrize("trouble", ["raises_in_stage", "out_of_memory_in_stage", "killed_in_stage"])
def test_trouble_ends_all_ranks_with_one_message(launch, traces, tmp_path, trouble):
    options = ["--model", f"models_for_tests:{trouble}", "--device", "cuda", "--steps", 3]
    done = launch(4, traces / "1f1b.json", *options, env={"TROUBLE_AT": str(tmp_path / "at"), "COLD_RANKS": "1"})
    assert done.code != 0 and len([line for line in done.ours if not line.startswith(" ")]) == 1, done.err
