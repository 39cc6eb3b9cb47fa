"""A script that drives Engines on four ranks: the bits of one process, evaluation, resuming, and messages."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import further
from torch.nn.functional import mse_loss

import schedgen
from mpirun.data.loader import DREW
from mpirun.engine.recipe import NamedParameter
from mpirun.training.arguments import make_recipe, take_model
from schedgen.checker.files import checked
from schedgen.cli.main import main as command
from schedgen.report.measured_run import read_trace, run_numbers
from schedgen.schemes import SCHEMES, load
from schedgen.util.errors import UsageError

PROGRAM = Path(__file__).parents[2] / "helpers" / "programs" / "drive_engine.py"
SCHEDULES = {
    "1f1b": ["1f1b"], "zb-h1": ["zb-h1"], "ddp": ["ddp"], "fsdp-shards": ["fsdp", "--shards", "4"],
}  # fmt: skip
TRAINED = ("1f1b", *further("zb-h1", "ddp"), "fsdp-shards")
BUCKETS = (*further(("1f1b", True), ("fsdp-shards", False)), ("zb-h1", True), ("fsdp-shards", True))  # canonical or not
SOME = ("ddp", "fslpp", "interleaved-1f1b", "zb-v", "chimera", "hanayo", "1f1b-rr", "pipedream")
PREDICTED = (*SOME, *further(*(scheme for scheme in SCHEMES if scheme not in SOME)))


MINE = """
mode = "strict"
def w(s, b, d):
    return s, s
def n(s, b, d):
    return 100 * d + b
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory, launch) -> dict[str, Any]:
    """The results of all checks of programs/drive_engine.py."""
    folder = tmp_path_factory.mktemp("engine")
    for name, scheme in SCHEDULES.items():
        sizes = ["--workers", "4", "--stages", "4", "--microbatches", "8"]
        assert command(["compile", *scheme, *sizes, "-o", str(folder / f"{name}.json")]) == 0
    for name in ("forward", "recompute"):
        options = ["--recompute", "all"] if name == "recompute" else ["--forward"]
        sizes = ["--stages", "4", "--microbatches", "8", *options]
        assert command(["compile", "1f1b", *sizes, "-o", str(folder / f"{name}.json")]) == 0
    (folder / "mine.py").write_text(MINE)
    (folder / "predict").mkdir()
    alike: dict[object, str] = {}
    predicts_as = {}
    for name in PREDICTED:
        program = of_scheme(name)
        forwards = [column.tobytes() for column in schedgen.forward_list(program).rows]
        key = *forwards, program.header.owners, program.header.weight_versions.updates
        predicts_as[name] = alike.setdefault(key, name)
        if predicts_as[name] == name:
            with (folder / "predict" / f"{name}.json").open("wb") as out:
                schedgen.write(program, out)
    (folder / "cases.json").write_text(json.dumps({"schemes": TRAINED, "buckets": BUCKETS}))
    done = launch(4, folder, program=(str(PROGRAM),), limit=600)
    assert done.code == 0, done.err
    return {**json.loads((folder / "found.json").read_text()), "folder": folder, "predicts as": predicts_as}


def of_scheme(name: str) -> schedgen.Program:
    """A program of 4 workers, with replicas or two stages per worker if the scheme allows these."""
    for stages, own in ((2, {"replicas": (3, 1)}), (8, {}), (4, {}), (4, {"groups": 2})):
        sizes = schedgen.Sizes(stages, 8, 4, **own)
        with contextlib.suppress(UsageError):
            return schedgen.compile(load(name, sizes), sizes)
    raise AssertionError(name)


def test_a_schedule_is_a_file_a_program_or_a_scheme(found):
    numbers = found["given_schedules"]
    assert numbers.keys() == {"file", "program", "scheme", "own"} and len({*map(str, numbers.values())}) == 1
    assert numbers["own"][1] == 2  # threads


def test_a_difference_is_allowed_up_to_a_tolerance(found):
    exact, by_default, given, (code, err) = found["tolerances"]
    assert (exact, by_default, given, code) == (False, True, True, 2)
    assert "tolerance should be a number of at least 0, not -1.0" in err


@pytest.mark.parametrize("scheme", TRAINED)
def test_every_scheme_gives_the_bits_of_one_process(found, scheme):
    assert found["schemes"][scheme]["numbers"] == found["schemes"]["1f1b"]["numbers"]
    verified, lines = found["schemes"][scheme]["verified"]
    assert verified and len(re.findall("by at most 0$", lines, re.M)) == 4
    assert "verify: buffers differ from one process by at most 0\n" in lines


@pytest.mark.parametrize(("name", "microbatches"), [("modules", 8), ("split", 8), ("shared out", 2)])
def test_buffers_that_forwards_change_are_changed_once_verified_saved_resumed_and_exported(found, name, microbatches):
    """4 steps of 8 microbatches, of which a data-parallel rank has 2; the other schedules recompute all forwards."""
    verified, lines, whole, *resumed = found["statistics"][name]
    assert verified and "verify: buffers differ from one process by at most 0\n" in lines
    norms = {key: value for key, value in whole.items() if key.endswith("num_batches_tracked")}
    batch_norms = {value for key, value in norms.items() if key.replace("stage", "").split(".")[1] == "1"}
    deferred = {value for key, value in norms.items() if key.replace("stage", "").split(".")[1] == "3"}
    assert len(norms) == (6 if name == "modules" else 8)
    assert batch_norms == {4 * microbatches} and deferred == {4 * microbatches // 8}
    if name == "modules":
        assert whole["stage2.1.calls"] == 32
    assert resumed == ([whole] if name == "split" else [])


def test_rates_tokens_and_metrics_are_those_worked_out_by_hand(found):
    """8 microbatches of 2 samples a step; 41 samples of 8 numbers."""
    numbers = found["schemes"]["1f1b"]["numbers"]
    assert [entry[4] for entry in numbers] == [128, 128, 72] * 3
    assert [entry[3] for entry in numbers] == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3, 1.25e-3, 1.25e-3, 6.25e-4]
    assert numbers[0][2]["samples"] == 2.0
    # The last step has 9 samples: four microbatches of two, one of one.
    assert numbers[2][2]["samples"] == pytest.approx((4 * 2 * 2 + 1) / 9)


@pytest.mark.parametrize("scheme", TRAINED)
def test_evaluation_and_prediction_are_in_eval_mode_and_the_same_everywhere(found, scheme):
    of_scheme = found["schemes"][scheme]
    predictions, repeatable = of_scheme["predictions"]
    assert repeatable and len(predictions) == 41 and of_scheme["first"] == 16
    loss, metrics, samples = of_scheme["evaluation"]
    assert samples == 41
    # Running statistics are those of one worker, so a data-parallel scheme has others.
    if scheme not in ("ddp", "fsdp-shards"):
        assert of_scheme["evaluation"] == found["schemes"]["1f1b"]["evaluation"]
        assert predictions == found["schemes"]["1f1b"]["predictions"][0]
    values = torch.tensor(predictions)
    generator = torch.Generator().manual_seed(5)
    _, targets = (torch.randn(41, 8, generator=generator) for _ in range(2))
    assert loss == pytest.approx(mse_loss(values, targets).item(), rel=1e-5)
    assert metrics["largest"] == pytest.approx(values.abs().amax(1).mean().item(), rel=1e-5)


@pytest.mark.parametrize("scheme", PREDICTED)
def test_predictions_under_every_scheme_have_the_bits_of_one_process(found, scheme):
    """Schemes that have the same forwards and versions of weights predict alike: one of them does."""
    assert found["predictions"][found["predicts as"][scheme]]


def test_a_run_resumed_in_the_middle_of_an_epoch_gives_the_same_bits(found):
    whole, parts = found["resumed"]
    assert whole == parts and len(whole[0]) == 7


def test_a_batch_that_all_ranks_give_as_a_whole(found):
    losses, rates, metrics = found["one_given_batch"]
    assert len(losses) == 3 and losses[2] < losses[0] and rates == [1e-3, 2e-3, 3e-3] and metrics == {}


def test_a_stream_gives_what_a_dataset_gives(found):
    stream, dataset = found["from_a_stream"]
    assert stream == dataset and len(stream) == 6


def test_lengths_in_turn_give_the_bits_of_one_process_under_every_scheme(found):
    first = found["buckets"]["zb-h1 True"]
    for name, of_scheme in found["buckets"].items():
        verified, lines = of_scheme["verified"]
        assert verified, lines
        if name.endswith("True"):
            assert len(re.findall("by at most 0$", lines, re.M)) == 3
            assert of_scheme["numbers"] == first["numbers"] and of_scheme["evaluations"] == first["evaluations"]
            assert of_scheme["weights"] in ("", first["weights"])
    assert [entry[4] // 8 for entry in first["numbers"]] == [length * 16 for length in (6, 9, 9, 6, 6, 9, 6, 9)]
    assert [samples for _, samples in first["evaluations"]] == [32, 32]


@pytest.mark.parametrize("scheme", dict(BUCKETS))
def test_steps_of_a_block_are_traced_whatever_their_shape_and_not_what_is_evaluated_between(found, scheme):
    """Another test of `found` shows that they have the bits of one process, too."""
    program, trace = (str(found["folder"] / f"{scheme}.{kind}") for kind in ("json", "trace"))
    checked_program = checked(program)
    numbers = run_numbers(checked_program, read_trace(Path(trace).read_text(), trace, checked_program))
    assert numbers["passes"] == 4 and all(worker["busy"] > 0 for worker in numbers["workers"])


def test_numbers_go_to_a_callback_and_to_tensorboard(found):
    told, events = found["told"]
    assert told == [[step, ["grad_norm", "largest", "loss", "lr", "samples"]] for step in (1, 2)]
    assert events == ["events"]


SENTENCES = {
    "kept elsewhere": "has changed its _calls, slow, count of group 0, state of t, which checkpoints do not have",
    "device": "device: 'tpu' is none of 'auto', 'cpu' and 'cuda'",
    "lengths": "the datasets of the ranks have different lengths: [20, 21, 22, 23]",
    "forwards": "forward.json has forwards alone: nothing can be trained by it",
    "no loss": "loss: say what it is, modules have none",
    "no microbatches": "microbatches: say how many a step of 1f1b has",
    "no such scheme": "2f2b",
    "no groups": "fslpp needs --workers W and --groups G: an Engine has no such options, so give it a file",
    "other ranks": "the schedule is for 2 ranks, mpiexec -n 2, but this run has 4",
    "threads": "threads should be a whole number of at least 1, not 0",
    "wrong stages": "has 3 stages, not the 4 that it is asked for",
    "rate of a rank": "the learning rate of step 2 is not the same on all ranks: lr should depend on the step alone",
    "export to what is there": "it is not empty: export to a new directory",
    "clip": "clip should be a positive number, not -1.0",
    "autocast": "autocast: 'fp8' is not 'bf16'",
    "lr and scheduler": "lr and scheduler both say what the learning rate is: give one of them",
    "left out": "the optimizer leaves out stage0.linear.weight: freeze what is not to be trained",
    "rates of groups": "groups have the rates 0.1, 0.2, but lr sets one for all of them: leave lr out, and change them",
    "no optimizer": "should return a torch.optim.Optimizer, not int",
    "closure": "LBFGS computes gradients inside step(), which no schedule allows: use another one",
    "weights": "weights, if the module does not have them itself: give the name of a directory, not a OrderedDict",
    "batches": "batches should be a whole number, not -1",
    "no loader": "a int gives no batches: take what loader(...) returns",
    "no loader on some ranks": "a int gives no batches: take what loader(...) returns",
    "plateau": "a ReduceLROnPlateau does not tell the learning rate by the step",
    "pieces": "the optimizer Alone steps pieces of stage0.linear.weight differently from the whole, and several",
    "muon": "compile without --shards",
    "metric": "the metric shape should be a tensor of one number, not of shape (2, 8)",
    "different data": "ranks 0 and 3 have got different data for microbatch 0 of step 1",
    "different data later": "ranks 0 and 3 have got different data for microbatch 0 of step 4",
    "not divisible": "a batch of 31 samples cannot be cut into 8 microbatches of one size",
    "items": "the dataset's items should be pairs",
    "fewer": "last: 'fewer' is neither 'pad' nor 'drop': all microbatches have one shape",
    "size": "the loader's microbatch_size is 0",
    "trace first": "trace: the first step builds the stages: trace a later one",
    "trace in a trace": "trace: steps are traced already",
    "two save": "another run saves there: run ",
    "another optimizer": "the optimizer is torch.optim.sgd.SGD: ",
    "other data": ", but the loader 7: other samples would follow",
    "two shapes": "the microbatches of step 2 have shape (2, 8), not (4, 8) as the first: declare sizes with buckets=",
    "ragged": "of step 1 have shapes (2, 6, 8) and (2, 9, 8): all of one step must have the same",
    "undeclared": "the microbatches of step 2 have shape (2, 9, 8), not one of buckets=(6, 8)",
    "no size": "the microbatches of step 1 have shape (2,), not one of buckets=(6,)",
    "buckets": "buckets should be sizes, whole numbers of at least 1, not (0,)",
    "traced": "buckets: what split has traced has one shape: give modules or a Model",
    "closed": "the Engine is closed",
    "save first": "save: nothing has been trained or evaluated yet",
    "export first": "export: nothing has been trained or evaluated yet",
    "verify": "verify: say verify=True where the Engine is made",
}


@pytest.mark.parametrize("mistake", SENTENCES)
def test_a_mistake_ends_all_ranks_with_one_sentence(found, mistake):
    if mistake == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    code, err = found["sentences"][mistake]
    lines = [line for line in err.splitlines() if line.startswith("mpirun: ") and "note:" not in line]
    assert code in (1, 2) and len(lines) == 1 and SENTENCES[mistake] in lines[0], err


def test_what_becomes_of_the_last_step_is_said_once_in_a_run(found):
    _, err = found["sentences"]["save first"]
    note = "mpirun: note: the TensorDataset of 41 samples: the last step of an epoch has 9 of 16: padded, weight 0"
    assert [line for line in err.splitlines() if "note:" in line] == [note]


def test_a_run_that_is_asked_to_leave_saves_and_leaves(found):
    code, err, folders = found["asked_to_leave"]
    assert code == 143 and "asked to leave (SIGTERM): saved after step 2" in err
    assert folders == ["step-00000001", "step-00000002"]


def test_one_process_needs_no_launcher(launch):
    """As in a notebook: 60 Engines in turn, each a run of its own, on a schedule of one worker."""
    script = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
losses = []
for number in range(60):
    with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0,
                       lr=0.1 * (number % 2)) as run:
        losses.append([run.step((x, x)).loss for _ in range(2)])
print(all(second < first for first, second in losses[1::2]), all(a == b for a, b in losses[0::2]))
"""
    done = launch(None, program=("-c", script))
    assert done.code == 0 and done.out.split() == ["True", "True"], done.err


COLUMN = """
import torch, mpirun
from torch.nn.functional import mse_loss
table, column = torch.arange(6.0).view(2, 3), lambda y, target: mse_loss(y[:, 0], target)
with mpirun.Engine("gpipe", [torch.nn.Linear(3, 1)], microbatches=2, loss=column) as run:
    print(len(run.step((table, table[:, 0])).losses))
"""


def test_a_target_may_be_a_column_of_a_table_of_which_a_microbatch_has_one_sample(scripts):
    (done,) = scripts(1, [[COLUMN]])
    assert (done.code, done.out) == (0, "2\n"), done.err


@pytest.mark.parametrize("given", [torch.optim.Adam, functools.partial(torch.optim.Adam, eps=1e-3)])
def test_an_optimizer_s_class_is_called_with_the_parameters_alone(given):
    weight = torch.nn.Parameter(torch.ones(1))
    made = make_recipe(given, 0.1, None, None).make([NamedParameter("weight", weight, weight.shape, True)])
    (group,) = made.optimizer.param_groups
    assert type(made.optimizer) is torch.optim.Adam and group["params"] == [weight] and "param_names" not in group


def test_rates_are_numbers_of_any_type_that_are_not_negative():
    assert make_recipe(None, np.float32(0.5), None, None).rate(0) == 0.5
    for rate in (np.float64(-0.5), True, "0.5"):
        with pytest.raises(UsageError, match="lr should be a number of at least 0, or a function of the step, not "):
            make_recipe(None, rate, None, None)
    with pytest.raises(UsageError, match=r"the learning rate of step 3 is -0\.5, not a number of at least 0"):
        make_recipe(None, lambda step: -0.5, None, None).rate(2)


def test_a_module_that_is_not_in_stages_is_to_be_split():
    """A Sequential's children are its stages, if there are as many as are asked for."""
    module = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    taken = take_model(module, torch.nn.functional.mse_loss, 4, None, None, 0)
    assert [*taken.stages] == [*module]
    for given, name in ((module, "Sequential"), (module[0], "Linear")):
        words = f"the model, a {name}, is not in 2 stages: split it first, mpirun.split(model, example, stages=2)"
        for stages, layers in ((2, None), (1, [1, 1])):
            with pytest.raises(UsageError, match=re.escape(words)):
                take_model(given, torch.nn.functional.mse_loss, stages, layers, None, 0)


RESUMES = """
import sys, torch, mpirun
from mpirun.examples.mlp import tiny
model = tiny(1)
text = torch.frombuffer(bytearray(open(sys.argv[3], "rb").read()), dtype=torch.uint8)
with mpirun.Engine(sys.argv[1], model) as run:
    loader = run.loader(lambda step, microbatch, rng: model.batch(text, rng))
    assert run.resume(sys.argv[2])
    print(run.step(next(iter(loader))).loss, run.steps)
"""


def test_a_run_of_the_command_line_goes_on_in_a_script(several, scripts, compiled, text, tmp_path):
    """With the same optimizer; a script does not know the text."""
    schedule = compiled("1f1b", stages=1, microbatches=2)
    options = ["--model", "mpirun.examples.mlp:tiny", "--text", text, "--steps", 2, "--save", tmp_path]
    ((code, out),) = several(1, [[schedule, *options]])
    assert code == 0, out
    (done,) = scripts(1, [[RESUMES, schedule, tmp_path, text]])
    assert done.out.split()[-1] == "3", done.err
    assert done.err == "mpirun: note: the checkpoint was made with another text\n"


def test_an_exception_that_is_caught_ends_its_engine_alone(launch):
    """As in a notebook, which catches all exceptions: the watchdog lets the process live; another Engine follows."""
    script = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
for error in (ValueError("mine"), KeyboardInterrupt(), None):
    try:
        with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss) as run:
            watchdog = run.session.watchdog.process
            run.step((x, x))
            if error is not None:
                raise error
            print("done")
    except BaseException as caught:
        assert caught is error
    assert watchdog.wait(60) == 0
mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss,
              lr=lambda step: float("nan")).step((x, x))
"""
    done = launch(None, program=("-c", script))
    sentence = "mpirun: the learning rate of step 1 is nan, not a number\n"
    assert (done.code, done.out, done.err) == (2, "done\n", sentence)


INTERRUPTED = """
import math, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Stage(nn.Linear):
    def forward(self, x):
        y = super().forward(super().forward(x))  # of such a graph no backward is cut
        if self.is_last and interrupted[0] == "forward":
            self.zero_grad()
            raise KeyboardInterrupt
        if self.is_last and interrupted[0] == "backward":
            y.register_hook(interrupt)
        return y
class Counting(Stage):
    def __init__(self, *size):
        super().__init__(*size)
        self.register_buffer("same", torch.ones(1))
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.calls * super().forward(x)
def interrupt(gradient):
    raise KeyboardInterrupt
def train(kind, *ways):
    torch.manual_seed(0)
    stages, found = [kind(4, 4), kind(4, 4)], []
    for number, stage in enumerate(stages):
        stage.is_last = number == 1
    sgd = lambda named: torch.optim.SGD([entry.parameter for entry in named], 0.1)
    with mpirun.Engine(scheme, mpirun.Model(stages, mse_loss, loss_of=loss_of), microbatches=2, optimizer=sgd,
                       on_nan="skip", verify=True) as run:
        for number, interrupted[0] in enumerate(ways):
            x = torch.full((4, 4), math.nan if interrupted[0] == "skipped" else float(number))
            try:
                if interrupted[0] != "left out":
                    found.append(run.step((x, 2 * x)).losses)
            except KeyboardInterrupt:
                interrupted[0] = ""
        assert run.verify()
    found = [losses for losses in found if math.isfinite(losses[0])]
    assert len(found) == 3
    return found
interrupted = [""]
for scheme, loss_of in (*((name, "microbatch") for name in ("gpipe", "1f1b", "zb-v")), ("gpipe", "minibatch")):
    print(train(Stage, "", "forward", "", "backward", "") == train(Stage, "", "left out", "", "left out", ""))
    print(train(Counting, "", "skipped", "", "skipped", "") == train(Counting, "", "left out", "", "left out", ""))
"""


def test_a_step_after_one_that_was_interrupted_takes_its_own_batch(scripts):
    """And has the whole gradient; so has a step after one that was skipped, which leaves counts of calls, too."""
    (done,) = scripts(1, [[INTERRUPTED]])
    assert done.code == 0 and [line for line in done.out.split() if line in ("True", "False")] == 8 * ["True"], done


AGAIN = """
import os, signal, sys, threading, torch, mpirun
from torch.nn.functional import mse_loss
import mpirun.comm.progress_thread, mpirun.engine.first_step
def engine(**options):
    torch.manual_seed(0)
    stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    return mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=mse_loss, **options)
def now():
    return signal.getsignal(signal.SIGTERM), sys.excepthook, threading.active_count(), torch.get_num_threads()
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
before, x = now(), torch.zeros(8, 4)
stopped = []
try:
    engine(buckets=(0,))
except SystemExit as error:
    stopped.append((error.code, now() == before))
for module in (mpirun.comm.progress_thread, mpirun.engine.first_step):
    module.LONG = 0.0  # a thread calls MPI during every job
mpirun.engine.first_step.needs_calls = lambda seconds, size: True
for _ in range(2):
    with engine(log=sys.argv[1]) as run:
        for _ in range(3):
            run.step((x, x))
        during = now()
    stopped.append((during[0] != before[0], now() == before))
lines = run.comm.gather(f"{stopped} {during[1] != before[1]} {during[2] > before[2]}")
if lines:
    print(*lines, before[0] is signal.SIG_DFL, sep="\\n")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_is_closed_or_refused_leaves_nothing_behind(ranks, tmp_path, launch):
    """Neither its handlers of SIGTERM and of exceptions, nor its threads, TensorBoard's and torch's included."""
    done = launch(ranks, tmp_path, program=("-c", AGAIN))
    ended = f"[(2, True), (True, True), (True, True)] {ranks > 1} True"
    assert done.out.splitlines() == [ended] * ranks + ["True"], done.err
    assert done.code == 0 and "buckets" in done.err


HANDLERS = """
import os, signal, sys, threading, torch, mpirun
from torch.nn.functional import mse_loss
def engine():
    return mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0)
def step(run):
    run.step((torch.zeros(8, 4), torch.zeros(8, 4)))
def own(*_):
    print("own")
"""


def test_a_handler_of_the_scripts_own_stays(scripts):
    script = """
signal.signal(signal.SIGTERM, own)
with engine() as run:
    step(run)
    signal.raise_signal(signal.SIGTERM)
    step(run)
print(signal.getsignal(signal.SIGTERM) is own)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["own", "True"]), done.err


@pytest.mark.parametrize("last_first", [False, True])
def test_runs_at_one_time_give_back_sigterm_and_threads_in_whatever_order_they_end(last_first, scripts):
    """Runs that have not ended keep them: SIGTERM ends the next one that steps."""
    script = """
last_first, threads = sys.argv[1] == "True", torch.get_num_threads()
torch.set_num_threads(len(os.sched_getaffinity(0)) + 1)
before, runs = torch.get_num_threads(), [engine() for _ in range(3)]
for run in runs:
    step(run)
last = runs.pop(1)
for run in reversed(runs) if last_first else runs:
    run.close()
print(torch.get_num_threads() < before)
signal.raise_signal(signal.SIGTERM)
try:
    step(last)
except SystemExit as end:
    print(end.code)
last.close()
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, torch.get_num_threads() == before)
torch.set_num_threads(threads)
"""
    (done,) = scripts(1, [[HANDLERS + script, last_first]])
    assert (done.code, done.out.split()) == (0, ["True", "143", "True", "True"]), done.err


def test_runs_at_one_time_give_back_excepthook_in_whatever_order_they_end(scripts):
    script = """
def engine():
    stages = [torch.nn.Linear(4, 4) for _ in range(2)]
    return mpirun.Engine("gpipe", stages, stages=2, microbatches=2, loss=mse_loss, timeout=0)
before = sys.excepthook
for order in ("012", "102", "210"):
    hooks = {}
    for number in range(3):
        run = engine()
        hooks[run] = sys.excepthook
    assert len({before, *hooks.values()}) == 4
    for run in [list(hooks)[int(number)] for number in order]:
        run.close()
        del hooks[run]
        assert sys.excepthook is [before, *hooks.values()][-1], order
"""
    (done,) = scripts(2, [[HANDLERS + script]])
    assert done.code == 0, done.err


def test_the_steps_of_a_run_can_be_read_when_it_has_ended(scripts):
    script = """
with engine() as run:
    step(run)
    step(run)
print(run.steps)
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["2"]), done.err


@pytest.mark.parametrize("teacher_first", [False, True])
def test_sigterm_ends_the_run_that_trains_beside_one_that_only_evaluates(teacher_first, tmp_path, scripts):
    """Even if the run that only evaluates has trained before, and saved."""
    script = """
x, (teacher, student) = torch.zeros(8, 4), [engine() for _ in range(2)][:: 1 if sys.argv[1] == "True" else -1]
with teacher, student:
    if sys.argv[1] == "True":
        step(teacher)
        teacher.save(sys.argv[2])
    step(student)
    teacher.evaluate([(x, x)])
    signal.raise_signal(signal.SIGTERM)
    teacher.evaluate([(x, x)] * 4)
    try:
        step(student)
    except SystemExit as end:
        print(end.code)
"""
    (done,) = scripts(1, [[HANDLERS + script, teacher_first, tmp_path / "teacher"]])
    assert (done.code, done.out.split()[-1:]) == (0, ["143"]), done.err


def test_steps_of_other_engines_that_sigterm_does_not_save_are_named(tmp_path, scripts):
    """Those since their last save; a run that has saved all of its steps is not named, nor one that has ended."""
    script = """
with engine() as ended:
    step(ended)
folder, runs = sys.argv[1], [engine() for _ in range(4)]
for name, run in enumerate(runs[:3]):
    step(run)
    run.save(f"{folder}/{name}")
step(runs[1])
step(runs[3])
step(runs[3])
signal.raise_signal(signal.SIGTERM)
try:
    step(runs[0])
except SystemExit as end:
    print(end.code)
for run in runs:
    run.close()
"""
    (done,) = scripts(1, [[HANDLERS + script, tmp_path]])
    note = f"not saved: 1 step of the Engine that saves to {tmp_path}/1, 2 steps of the Engine that has not saved"
    (said,) = [line for line in done.err.splitlines() if "not saved" in line]
    assert (done.code, done.out.split()[-1]) == (0, "143") and said.endswith(note)


def test_sigterm_ends_a_run_that_begins_after_it_came_unless_another_has_left(scripts):
    """It comes when a teacher is built and its student is not, or after the last step of a run that another follows."""
    script = """
def ended(run):
    try:
        step(run)
    except SystemExit as end:
        return end.code
with engine() as teacher, engine() as student:
    step(teacher)
    signal.raise_signal(signal.SIGTERM)
    print(ended(student))
with engine() as first:
    step(first)
    signal.raise_signal(signal.SIGTERM)
for _ in range(2):
    with engine() as run:
        print(ended(run))
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["143", "143", "None"]), done.err


def test_a_run_in_another_thread_leaves_sigterm_alone(scripts):
    """Only the main thread can set what a signal does."""
    script = """
def train():
    with engine() as run:
        step(run)
        print(run.steps, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    (done,) = scripts(1, [[HANDLERS + script]])
    assert (done.code, done.out.split()) == (0, ["1", "True"]), done.err


SAVING = """
import sys, torch, mpirun
from pathlib import Path
from torch.nn.functional import mse_loss
folder = Path(sys.argv[1])
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
def engine(stages=1, **options):
    torch.manual_seed(0)
    return mpirun.Engine("gpipe", [torch.nn.Linear(4, 4) for _ in range(stages)], stages=stages, microbatches=2,
                         loss=mse_loss, timeout=0, **options)
def steps(name):
    return [int(path.name[5:]) for path in sorted((folder / name).glob("step-*"))]
def refused(call):
    try:
        call()
    except SystemExit as end:
        return end.code
"""


def test_what_is_lost_of_a_module_is_said_in_notes_only_even_if_the_run_evaluates(scripts):
    script = """
layer = torch.nn.Linear(4, 4)
layer.compile()
x = torch.zeros(8, 4)
with mpirun.Engine("gpipe", [layer], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
    run.step((x, x))
    run.evaluate([(x, x)])
"""
    (done,) = scripts(1, [[SAVING + script, "none"]])
    lost = "stage 0: Module.compile is lost where a stage is copied: use torch.compile(module)"
    assert (done.code, {*done.err.splitlines()}) == (0, {f"mpirun: note: {lost}"})


def test_how_many_checkpoints_stay_is_what_each_save_says(tmp_path, scripts):
    script = """
with engine() as run:
    for keep in (2, 2, 2, 9, 9, None, 0, True, 1.0):
        if type(keep) is int and keep:
            run.step((x, x))
            run.save(folder / "kept", keep=keep)
        else:
            assert refused(lambda: run.save(folder / "kept", keep=keep)) == 2
assert steps("kept") == [2, 3, 4, 5], steps("kept")
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    sentences = [f"mpirun: keep should be a whole number of at least 1, not {keep!r}" for keep in (None, 0, True, 1.0)]
    assert (done.code, done.err.splitlines()) == (0, sentences)


def test_a_checkpoint_stays_until_another_of_its_step_is_whole(tmp_path, launch):
    """A limit on the size of files emulates a full disk: only the manifest, which is written last, exceeds it."""
    script = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run, saved = engine(), folder / "saved"
run.step((x, x))
assert run.save(saved, keep=1)
*others, size = sorted(path.stat().st_size for path in (saved / "step-00000001").iterdir())
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, before[1]))
assert (saved / "step-00000001" / "manifest.json").stat().st_size == size > others[-1]
assert not run.save(saved, keep=1)
assert engine().resume(saved)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
loader = run.loader([(row, row) for row in x], 4)
assert run.save(saved, data=loader, keep=1) and engine().resume(saved, data=loader)
print(*sorted(path.name for path in saved.iterdir()))
"""
    done = launch(None, tmp_path, program=("-c", SAVING + script))
    sentence = r"mpirun: no checkpoint of step 1: \S+: File too large; the last one is that of step 1"
    assert (done.code, done.out.splitlines()[-1]) == (0, ".lock step-00000001"), done.err
    assert re.fullmatch(sentence, done.err.strip()), done.err


def test_a_run_saves_to_two_directories_in_turn(tmp_path, scripts):
    """As the last and the best; no other run saves there until it ends. It may also save to where it resumed from."""
    script = """
run = engine()
for _ in range(3):
    run.step((x, x))
    run.save(folder / "last")
    run.save(folder / "best", keep=1)
assert (steps("last"), steps("best")) == ([1, 2, 3], [3])
other = engine()
other.resume(folder / "last")
other.step((x, x))
assert refused(lambda: other.save(folder / "last")) == 2
assert not (folder / "last" / ".seen").exists()
run.close()
other.save(folder / "other")
other.save(folder / "last")
assert steps("last") == [2, 3, 4]
other.close()
with engine() as third:
    third.step((x, x))
    for _ in range(2):
        assert refused(lambda: third.save(folder / "last")) == 2
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    begin = f"mpirun: saving to {tmp_path / 'last'}: "
    others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
    refused = ["another run saves there: run ", others, others]
    lines = done.err.splitlines()
    assert done.code == 0 and len(lines) == 3, done.err
    assert all(line.startswith(begin + words) for line, words in zip(lines, refused, strict=True)), done.err
    assert lines[0].endswith(", which is this script: close its earlier Engine")


def test_names_are_those_of_the_working_directory_at_the_call_and_no_trace_overwrites_the_schedule(tmp_path, scripts):
    script = """
import os
before = os.getcwd()
for name in ("here", "there"):
    (folder / name).mkdir()
(folder / "mine.py").write_text("def w(s, b, d): return s, s\\ndef n(s, b, d): return b\\n")
with engine() as other:
    other.step((x, x))
    other.save(folder / "there" / "saved")
os.chdir(folder)
with mpirun.Engine("mine.py", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
    run.step((x, x))
    os.chdir(folder / "here")
    run.save("saved")
    with run.trace("trace"):
        run.step((x, x))
        os.chdir(folder / "there")
    assert (folder / "here" / "trace").exists()
    assert refused(lambda: run.save("saved")) == 2
    assert refused(lambda: run.trace("../mine.py").__enter__()) == 2
os.chdir(before)
assert (steps("here/saved"), steps("there/saved")) == ([1], [1])
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    path = tmp_path / "there" / "saved"
    assert (done.code, done.err.splitlines()) == (0, [
        f"mpirun: saving to {path}: it has checkpoints of another run: resume from it, move it, or save elsewhere",
        f"mpirun: {path.parent}/../mine.py would be overwritten, but it is read, too: give the output another name",
    ])  # fmt: skip


def test_a_restarted_run_saves_to_both_directories_again(tmp_path, scripts):
    """To those of the run that it resumed, or of one that resumed the same; to no others, nor with other settings."""
    script = """
def run(resume, saves, clip=None):
    with engine(clip=clip) as of_one:
        assert of_one.resume(folder / resume) == (resume != "none")
        for names in saves:
            of_one.step((x, x))
            for name in names:
                of_one.save(folder / name)
run("none", [["last"], ["best"], ["last"], ["best"]])
run("last", [["best"], ["best"], ["last"]], 0.2)  # the third step was the last that was saved
run("last", [["best"]], 0.2)
run("last", [["best"]], 0.2)  # it ended before it came to save the last one again
run("last", [["tuned"]])
assert (steps("last"), steps("best"), steps("tuned")) == ([1, 3, 6], [4, 5, 7], [7])
for resume, name in (("last", "best"), ("none", "best"), ("none", "tuned")):
    assert refused(lambda: run(resume, [[name]])) == 2
assert (steps("best"), steps("tuned")) == ([4, 5, 7], [7])
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    said = [line.replace(f"{tmp_path}/", "") for line in done.err.splitlines() if " was made with " not in line]
    ahead = "has a checkpoint of step 7, but this run went on from step 6"
    others = "it has checkpoints of another run: resume from it, move it, or save elsewhere"
    assert done.code == 0, done.err
    assert said == [
        "mpirun: note: best has a checkpoint of step 4, but this run went on from step 3",
        f"mpirun: note: best {ahead}",
        *(f"mpirun: saving to {name}: {others}" for name in ("best", "best", "tuned")),
    ]


def test_a_run_that_is_asked_to_leave_saves_to_the_directory_that_is_resumed(tmp_path, scripts):
    """With the position in the data, wherever it saved last: a restart does not resume the best, which has none."""
    script = """
import signal
def train(run, loader, saves):
    for batch in loader:
        run.step(batch)
        for name, options in saves:
            run.save(folder / name, **options)
        saves = ()
        signal.raise_signal(signal.SIGTERM)
data, best = [(row, row) for row in torch.cat([x] * 3)], ("best", {"keep": 1})
for number, name in enumerate(("last", "last", "best", "last")):
    with engine() as run:
        loader = run.loader(data, 2)
        assert run.resume(folder / name, data=loader if name == "last" else None) == (number > 0)
        assert loader.step == [0, 2, 0, 2][number]
        last = "last", {} if number == 1 else {"data": loader}
        saves = [best] if number == 3 else [best, last, best]
        print(refused(lambda: train(run, loader, saves)), steps("last"), steps("best"))
for found in (False, True):
    with engine() as run:
        assert run.resume(folder / "new", data=(loader := run.loader(data, 2))) == found
        assert loader.step == 2 * found
        print(refused(lambda: train(run, loader, [("new best", {"keep": 1})])), steps("new"), steps("new best"))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    found = [line for line in done.out.splitlines() if line.startswith("143")]
    wanted = ["143 [1, 2] [1]", "143 [2, 3, 4] [3]", "143 [3, 4, 5] [4]", "143 [3, 4, 5, 7] [6]"]
    wanted += ["143 [2] [1]", "143 [2, 4] [3]"]
    assert (done.code, found) == (0, wanted), done.err


def test_a_run_that_is_asked_to_leave_while_it_evaluates_saves_and_leaves_between_two_batches(tmp_path, scripts):
    """One rank is asked. The batch that waits for its step is repeated, though the evaluation reads the same loader."""
    script = """
import signal
data, seen = [(row, row) for row in torch.cat([x] * 10)], []
def each(number, output):
    seen.append(number)
    if number == 5:
        signal.raise_signal(signal.SIGTERM)
with engine(2) as run:
    loader = run.loader(data, 2)
    for batch in loader:
        if run.steps == 2:
            print(refused(lambda: run.predict(loader, each=each)), steps("last"))
            assert seen == (list(range(8)) if run.rank == 1 else []), seen
            break
        run.step(batch)
        if run.steps == 1:
            run.save(folder / "last", data=loader)
with engine(2) as run:
    loader = run.loader(data, 2)
    assert run.resume(folder / "last", data=loader)
    print(run.steps, loader.step)
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    found = [line for line in done.out.splitlines() if line[0].isdigit()]
    assert (done.code, found) == (0, ["143 [1, 2]", "2 2"] * 2), done.err


@pytest.mark.parametrize("exchanged", ["parameter.data.neg_()", "parameter.data = -parameter.data"])
def test_weights_that_a_script_exchanges_for_an_evaluation_are_not_saved_as_those_of_the_step(
    tmp_path, scripts, exchanged
):
    """A step that is saved is not saved again; after an unsaved one the run goes on to the next, and leaves then.

    `data` changes a parameter unseen by autograd, as many implementations of an average do.
    """
    script = """
import signal
from safetensors.torch import load_file
def asked(number, output):
    if number == 1:
        signal.raise_signal(signal.SIGTERM)
def weights(step):
    (file,) = (folder / "last" / f"step-{step:08}").glob("weights*")
    return load_file(file)["stage0.weight"]
def exchanged(run):
    for parameters in run.session.interpreter.optimizer.parameters.values():
        for parameter in parameters:
            exec(sys.argv[2])
for unsaved in (False, True):
    with engine() as run:
        run.resume(folder / "last")
        run.step((x, x))
        run.save(folder / "last")
        if unsaved:
            run.step((x, x))
        before = {number: weights(number) for number in steps("last")}
        exchanged(run)
        print(refused(lambda: run.predict([(x, x)] * 4, each=asked)))
        if unsaved:
            exchanged(run)
            print(refused(lambda: run.step((x, x))))
        print(steps("last"), all(weights(number).equal(value) for number, value in before.items()))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path, exchanged]])
    found = [line for line in done.out.splitlines() if not line.startswith(("checkpoint", "resumed"))]
    wanted = ["143", "[1] True", "None", "143", "[1, 2, 4] True"]
    assert (done.code, found) == (0, wanted), done.err


def test_values_that_a_script_gives_its_parameters_count_at_once(tmp_path, scripts):
    """Written in place or assigned to `data`, for an evaluation, which restores them, or for good.

    Of pieces of weights, and with weight versions, too, where the last STEP has left others than the next step begins
    with.
    """
    script = """
from safetensors.torch import load_file
def trained(scheme, assigns):
    owned = []
    def optimizer(named):
        owned.extend(entry.parameter for entry in named)
        return torch.optim.SGD(owned[-len(named):], 0.5)
    def put(values):
        for parameter, value in zip(owned, values, strict=True):
            if assigns:
                parameter.data = value
            else:
                parameter.data.copy_(value)
    def kept():
        return [parameter.data if assigns else parameter.data.clone() for parameter in owned]
    def state():
        for name, value in run.state_dict().items():
            yield name, value.tolist()
    name = f"{scheme} {assigns}"
    run = mpirun.Engine(scheme, [torch.nn.Linear(4, 4) for _ in range(2)], stages=2, microbatches=2, loss=mse_loss,
                        optimizer=optimizer, timeout=60)
    with run:
        for step in range(2):
            yield run.step((x, x)).loss
        before = kept()
        yield "trained", run.evaluate([(x, x)]).loss, *state()
        put([torch.full_like(value, 0.25) for value in before])
        yield "average", run.evaluate([(x, x)]).loss, *state()
        run.save(folder / name)
        run.export(folder / f"{name} export")
        put(before)
        yield "trained", run.evaluate([(x, x)]).loss, *state()
        put([torch.full_like(value, 0.5) for value in before])
        yield run.step((x, x)).loss, run.step((x, x)).loss, *state()
    if run.rank == 0:
        files = [*folder.glob(f"{name}*/*.safetensors"), *folder.glob(f"{name}/step*/weights*")]
        assert len({file.parent for file in files}) == 2, files
        assert all((value == 0.25).all() for file in files for value in load_file(file).values())
for scheme in ("gpipe", "fsdp", "pipedream"):
    torch.manual_seed(0)
    written = list(trained(scheme, assigns=False))
    torch.manual_seed(0)
    assert list(trained(scheme, assigns=True)) == written
    assert written[2] == written[4] != written[3]
    average = (x.sum(1, keepdim=True) * 0.25 + 0.25).expand(8, 4)
    average = (average.sum(1, keepdim=True) * 0.25 + 0.25).expand(8, 4)
    torch.testing.assert_close(torch.tensor(written[3][1]), mse_loss(average, x))
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err


@pytest.mark.parametrize("scheme", ["1f1b", "pipedream"])
def test_a_rank_whose_script_freezes_a_parameter_between_steps_ends_all_with_one_sentence(tmp_path, scheme, scripts):
    script = """
modules = [torch.nn.Linear(4, 4) for _ in range(2)]
with mpirun.Engine(sys.argv[2], modules, stages=2, microbatches=2, loss=mse_loss, lr=0.1, timeout=60) as run:
    run.step((x, x))
    if run.rank == 1:
        modules[1].bias.requires_grad_(False)
    run.step((x, x))
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path, scheme]])
    (line,) = [line for line in done.err.splitlines() if line.startswith("mpirun: ")]
    assert (done.code, line.partition(", but")[0]) == (2, "mpirun: requires_grad of stage1.bias has become False")


def test_evaluations_leave_the_buffers_alone_with_which_other_ranks_train(tmp_path, scripts):
    """Each rank has its own mean of the microbatches that it has seen; those of rank 0 are the model's."""
    script = """
class Centred(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return super().forward(x - self.mean)
def losses(evaluates):
    torch.manual_seed(0)
    with mpirun.Engine("ddp", [Centred()], stages=1, microbatches=4, loss=mse_loss, timeout=0) as run:
        for number in range(3):
            yield run.step((x + number, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
                run.predict([(x, x)])
                run.export(folder / str(number))
assert list(losses(True)) == list(losses(False))
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err


LAST_FIRST = """
import numpy as np
from schedgen import F
def w(s, b, d):
    return s, s
def n(s, b, d, *, stages):
    return np.where(d == F, s - 2 * b * stages, 1000 - s - 2 * b * stages)
"""


def test_a_run_begins_with_a_batch_whose_first_read_microbatch_is_padding(tmp_path, scripts):
    """The example microbatch that the stages are tried on has samples; so the loss has its metrics."""
    (file := tmp_path / "last_first.py").write_text(LAST_FIRST)
    script = """
def loss(output, target):
    return mse_loss(output, target), {"largest": output.abs().max()}
with mpirun.Engine(sys.argv[2], [torch.nn.Linear(4, 4) for _ in range(2)], loss=loss, microbatches=4) as run:
    for batch in run.loader([(row, row) for row in x[:3]], 2):
        print(batch.samples, sorted(run.step(batch).metrics))
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path, file]])
    assert (done.code, done.out.splitlines()) == (0, ["[2, 1, 0, 0] ['largest']"] * 2), done.err


def test_canonical_bits_do_not_depend_on_where_a_microbatch_begins_in_memory(tmp_path, scripts):
    """Microbatches of 360 bytes: cut from a batch, most of them begin where no separate tensor would."""
    script = """
from torch.nn.functional import cross_entropy
stages = [torch.nn.Linear(5, 8), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 3))]
loss = lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten())
with mpirun.Engine("1f1b", stages, loss=loss, microbatches=4, verify=True, canonical=True) as run:
    for number in range(6):
        rng = torch.Generator().manual_seed(number)
        run.step((torch.randn(8, 9, 5, generator=rng), torch.randint(0, 3, (8, 9), generator=rng)))
    assert run.verify()
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err


def test_autocast_casts_a_value_from_another_stage_for_each_of_its_readers(tmp_path, scripts):
    """As it does without the cut: one cast for all of them would add their gradients in bfloat16."""
    script = """
class Readers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        return x + sum(layer(x) for layer in self.layers)  # in float32
stages = [Readers(), Readers()]
with mpirun.Engine("gpipe", stages, stages=2, loss=mse_loss, microbatches=2,
                   autocast="bf16", verify=True, canonical=True) as run:
    run.step((x, x))
    assert run.verify()
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err


def test_what_has_no_position_in_the_data_is_not_saved_and_not_resumed(tmp_path, scripts):
    script = """
with engine() as run:
    run.step((x, x))
    data = torch.utils.data.DataLoader([0])
    print(refused(lambda: run.save(folder / "new", data=data)))
with engine() as run:
    print(refused(lambda: run.resume(folder / "new", data=[data])))
assert not (folder / "new").exists()
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    sentences = [f"mpirun: data: give what loader(...) returns, not a {kind}" for kind in ("DataLoader", "list")]
    assert (done.code, done.out.split(), done.err.splitlines()) == (0, ["2", "2"], sentences)


CENTRED = """
from torch import nn
class Centred(nn.Linear):
    def __init__(self, persistent):
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4), persistent)
    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean.clone())
class Cloned(Centred):
    def state_dict(self, **options):
        return {name: x.clone() for name, x in super().state_dict(**options).items()}
def losses(make, at, persistent):
    torch.manual_seed(0)
    net = make(persistent)
    for count in at:
        with mpirun.Engine("gpipe", [net], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
            name = folder / f"{make.__name__} {len(at)}"
            run.resume(name)
            while run.steps < count:
                loss = run.step((x + run.steps, x)).loss
            run.save(name)
    return loss
"""


def test_buffers_that_forwards_change_and_checkpoints_lack_are_named(tmp_path, scripts):
    (done,) = scripts(1, [[SAVING + CENTRED + "losses(Centred, [1], True), losses(Centred, [1, 2], False)", tmp_path]])
    what = "which checkpoints do not have (persistent=False): after a restart they begin anew"
    note = f"mpirun: note: forwards change the buffers stage0.mean, {what}"
    assert done.code == 0 and done.err.splitlines() == [note, note], done.err


def test_checkpoints_have_the_tensors_of_which_a_module_saves_copies(tmp_path, scripts):
    script = "assert losses(Cloned, [2], True) == losses(Cloned, [1, 2], True)"
    (done,) = scripts(1, [[SAVING + CENTRED + script, tmp_path]])
    assert done.code == 0, done.err


def test_rank_0_prints_what_only_another_rank_sees_in_the_data(scripts):
    """That samples draw random numbers, when the rank first reads one in training, and in an evaluation."""
    script = """
import random, torch, mpirun
from torch.nn.functional import mse_loss
class Rows:
    def __init__(self, drawn):
        self.drawn = drawn
    def __len__(self):
        return 8
    def __getitem__(self, index):
        row = torch.full((4,), random.random() if index in self.drawn else 0.0)
        return row, row
with mpirun.Engine("ddp", [torch.nn.Linear(4, 4)], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
    run.evaluate(run.loader(Rows([3])))
    print(f"evaluated on {run.rank}", flush=True)
    for batch in run.loader(Rows([1])):
        run.step(batch)
"""
    (done,) = scripts(2, [[script]])
    late, first = done.err.splitlines()
    assert done.code == 0 and late == f"mpirun: note: {DREW}" and "they are made between the steps" in first


def test_a_run_whose_steps_are_all_done_is_exported_and_saved_when_it_is_started_again(tmp_path, scripts):
    """As one that was killed before its export: the data that it resumes give the shape of a microbatch."""
    script = """
from itertools import islice
from safetensors.torch import load_file
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(data)
def weights(name):
    files = (folder / name).glob("*.safetensors")
    return {key: value.tolist() for file in files for key, value in load_file(file).items()}
data = [(row, row) for row in x]
for kind, dataset in (("map", data), ("stream", Stream()), ("function", lambda *_: (x[2:4], x[:2]))):
    losses = []
    for part in ("whole", "exported", "saved"):
        with engine(2) as run:
            loader = run.loader(dataset, 2)
            assert run.resume(folder / kind, data=loader) == (part != "whole")
            for batch in islice(loader, 0 if run.steps else 1):
                run.step(batch)
                run.save(folder / kind, data=loader)
            if part == "saved":
                assert run.save(folder / kind, data=loader)
            else:
                run.export(folder / f"{kind}-{part}")
            assert (run.steps, loader.epoch, loader.step) == (1, 0, 1)
            losses.append(run.step(next(iter(loader))).loss)
    assert len({*losses}) == 1 and weights(f"{kind}-whole") == weights(f"{kind}-exported") != {}
with engine(2) as run:
    assert run.resume(folder / "map") and refused(lambda: run.export(folder / "without data")) == 2
"""
    (done,) = scripts(2, [[SAVING + script, tmp_path]])
    assert done.code == 0, done.err
    assert done.err.splitlines()[-1] == "mpirun: export: nothing has been trained or evaluated yet"


def test_modules_that_share_a_parameter_train_it_as_one(scripts):
    """Given as a list, as children of a Sequential, one of which may come twice, or tied by only some of its names."""
    script = """
import copy, sys
import mpirun, torch
from torch import nn
class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = self.again = weight
    def forward(self, x):
        return x @ self.weight.T
def modules():
    torch.manual_seed(0)
    embedding, twice = nn.Embedding(5, 4), nn.Linear(4, 4)
    return [embedding, twice, twice, Head(embedding.weight)]
def sgd(parameters):
    return torch.optim.SGD(parameters, 0.5)
x, y = torch.randint(5, (2, 3, 4), generator=torch.Generator().manual_seed(0)).unbind()
whole = nn.Sequential(*modules())
optimizer, plain = sgd(whole.parameters()), []
for step in range(3):
    loss = nn.functional.cross_entropy(whole(x[step]), y[step])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    plain.append(loss.item())
plain.append(nn.functional.cross_entropy(whole(x[2]), y[2]).item())
tied = mpirun.Model(modules(), nn.functional.cross_entropy, tied=[[(0, "weight"), (3, "weight")]])
for model in (modules(), nn.Sequential(*modules()), tied):
    with mpirun.Engine("1f1b", model, loss=nn.functional.cross_entropy, microbatches=2,
                       optimizer=lambda named: sgd([entry.parameter for entry in named])) as run:
        losses = [run.step((x[step], y[step])).loss for step in range(3)]
        losses.append(run.evaluate(run.loader(torch.utils.data.TensorDataset(x[2], y[2]), microbatch_size=1)).loss)
    torch.testing.assert_close(losses, plain, rtol=1e-5, atol=0)
"""
    (done,) = scripts(2, [[script]])
    assert done.code == 0, done.err


TIES = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
def linear(frozen=()):
    layer = nn.Linear(4, 4)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    return layer
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.a(x))
def frozen(first, second):
    stages = [{"l": lambda: linear(first), "own": linear}, {"m": lambda: linear(second)}]
    return stages, [[(0, f"l.{name}"), (1, f"m.{name}")] for name in ("weight", "bias")]
def twice(*names):
    return [{"l": linear}, {"t": Two}], [[(0, "l.weight"), *((1, name) for name in names)]]
stages, tied = eval(sys.argv[1])
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
with mpirun.Engine("gpipe", mpirun.Model(stages, mse_loss, tied=tied), stages=2, microbatches=2, verify=True,
                   canonical=True, timeout=60) as run:
    for _ in range(2):
        loss = run.step((x, x)).loss
    if run.rank == 0:
        print(loss)
    assert run.verify()
"""


def test_a_tie_may_name_the_parameters_of_a_stage_in_any_order(scripts):
    orders = ("'t.a.weight', 't.b.weight'", "'t.b.weight', 't.a.weight'")
    one, other = scripts(2, [[TIES, f"twice({names})"] for names in orders])
    assert (one.code, other.code) == (0, 0), one.err + other.err
    assert one.out == other.out


def test_what_is_tied_may_be_frozen_in_all_its_stages(scripts):
    for done in scripts(2, [[TIES, f"frozen({names}, {names})"] for names in (["bias"], ["weight", "bias"])]):
        assert done.code == 0, done.err


def test_what_is_frozen_in_one_stage_and_trained_in_another_is_not_tied(scripts):
    runs = scripts(2, [[TIES, "frozen(['weight'], [])"], [TIES, "frozen([], ['bias'])"]])
    assert [(run.code, run.err) for run in runs] == [
        (2, "mpirun: the model ties l.weight of stage 0, which is frozen, to m.weight of stage 1, which is trained\n"),
        (2, "mpirun: the model ties l.bias of stage 0, which is trained, to m.bias of stage 1, which is frozen\n"),
    ]


def test_evaluations_are_in_eval_mode_whatever_it_leaves_out(scripts):
    """A stage that is only a dropout returns its input; branches are not scaled, nothing is sampled, a buffer stays."""
    script = """
import copy
import mpirun, torch
from mpi4py import MPI
from torch import nn
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))
        self.register_buffer("mean", torch.zeros(512))
    def forward(self, x):
        for layer in self.layers:
            y = torch.tanh(layer(x))
            if self.training:
                y = y * y.new_empty(len(y), 1).bernoulli_(0.8) / 0.8
            x = x + y
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            x = x + torch.randn_like(x)
        return x - self.mean
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.Linear(512, 512))
x = torch.randn(64, 512)
data = torch.utils.data.TensorDataset(x, torch.zeros(64, 512))
branches = Branches()
for net, model in ((plain, list(plain)), (branches, mpirun.split(branches, x[:4], stages=3))):
    with mpirun.Engine("1f1b", model, loss=nn.functional.mse_loss, stages=3, microbatches=8, timeout=60) as run:
        loader = run.loader(data, microbatch_size=4)
        expected = copy.deepcopy(net).eval()(x)
        for trained in (False, True):
            found, predicted = run.evaluate(loader), run.predict(loader)
            if run.rank == 0 and not trained:
                torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(found.loss, expected.square().mean().item(), rtol=1e-5, atol=0)
            for batch in loader:
                run.step(batch)
        before = run.evaluate(loader).loss
        assert before == run.evaluate(loader).loss
"""
    (done,) = scripts(3, [[script]])
    assert done.code == 0, done.err


ADAPTED = """
import mpirun, torch
from torch import nn
from torch.nn.functional import linear, mse_loss
class Adapted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.added = nn.Parameter(torch.randn(4, 4))
        self.merged = False
        self.weight.requires_grad_(False)
    def train(self, mode=True):
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * self.added.data
            self.merged = not mode
        return super().train(mode)
    def forward(self, x):
        return super().forward(x) + (0 if self.merged else linear(x, self.added))
"""


def test_modules_with_a_train_of_their_own_are_told_when_an_evaluation_ends(scripts):
    """As layers that add an adapter to their weight in eval mode; one that was in eval mode before stays in it."""
    script = """
def losses(evaluates):
    torch.manual_seed(0)
    x, net = torch.randn(4, 4), nn.Sequential(Adapted(), Adapted(), nn.Dropout())
    net[2].eval()
    with mpirun.Engine("gpipe", [net], stages=1, microbatches=2, loss=mse_loss, timeout=0) as run:
        for _ in range(3):
            yield run.step((x, x)).loss
            if evaluates:
                run.evaluate([(x, x)])
torch.testing.assert_close(list(losses(True)), list(losses(False)))
"""
    (done,) = scripts(1, [[ADAPTED + script]])
    assert done.code == 0, done.err


def test_an_eval_that_computes_with_weights_that_are_fetched_later_is_refused(scripts):
    """It would add the adapter of an earlier step. Where ranks have the weights, adapters may be merged."""
    script = """
for scheme in ("ddp", "fsdp"):
    torch.manual_seed(0)
    x, stages = torch.randn(4, 4), [Adapted(), Adapted()]
    expected = (stages[1](stages[0](x))).detach()
    with mpirun.Engine(scheme, stages, microbatches=2, loss=mse_loss, lr=0.0, timeout=60) as run:
        run.step((x, x))
        predicted = run.predict([(x, x)])
        if run.rank == 0:
            torch.testing.assert_close(predicted, expected)
"""
    (done,) = scripts(2, [[ADAPTED + script]])
    assert done.code == 2 and done.err.splitlines() == [
        "mpirun: eval() of stage 0 uses its trained weights, as layers that merge an adapter do, but ranks "
        "fetch them only afterwards: leave adapters unmerged, or take a schedule that fetches no weights, such as ddp"
    ]


SHARED_BUFFERS = """
import warnings, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Masked(nn.LayerNorm):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("mask", torch.ones(size))
    def forward(self, x):
        return super().forward(x * self.mask)
class Asking(Masked):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1)
def model(norm=nn.BatchNorm1d):
    shared = norm(4)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), shared) for _ in range(2)))
def train(stages):
    try:
        with mpirun.Engine("gpipe", stages, microbatches=2, loss=mse_loss, timeout=0) as run:
            print(run.step((x, x)).loss > 0)
    except SystemExit as end:
        print(end.code)
x, (same, _) = torch.randn(8, 4), model()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for stages in (
        list(model()), [same, same], mpirun.split_sequential(model(), stages=2),
        mpirun.split_sequential(model(), stages=1), list(model(Masked)), list(model(Asking)),
        mpirun.split(model(), x[:4], stages=2),
    ):
        train(stages)
"""


def test_buffers_that_forwards_change_are_not_shared_by_stages(scripts):
    """As a BatchNorm's: each stage would change its copy. Masks are shared; split puts these buffers into one stage."""
    (done,) = scripts(1, [[SHARED_BUFFERS]])
    assert (done.code, done.out.split()) == (0, ["2"] * 4 + ["True"] * 3), done.err
    two = [("1", 0, "1", 1), ("1", 0, "1", 1), ("0.1", 0, "1.1", 1), ("0.1", 0, "1.1", 0)]
    assert done.err.splitlines() == [
        f"mpirun: {name}.running_mean of stage {stage} and {its_name}.running_mean of stage {other} are one buffer, "
        "and forwards would change a copy in each: split puts it into one stage"
        for name, stage, its_name, other in two
    ]


@pytest.mark.parametrize(
    ("scheme", "drawn", "what"),
    [
        ("ddp", "all", "parameters"),
        ("ddp", "scale", "frozen parameters or buffers"),
        ("ddp", "order", "frozen parameters or buffers"),
        ("fsdp", "scale", "frozen parameters or buffers"),
        ("fsdp", "all", "parameters"),
        ("gpipe", "all", "parameters"),
        ("gpipe", "scale", None),
        ("1f1b", "all", "weight"),
    ],
)
def test_ranks_that_draw_different_weights_are_told_so(scheme, drawn, what, scripts):
    """All weights, also of stages that one rank holds alone; buffers of these may differ."""
    script = """
import sys
import mpirun, torch
from mpi4py import MPI
_, scheme, drawn = sys.argv
def stage(weight=None):
    module = torch.nn.Linear(4, 4)
    module.weight = module.weight if weight is None else weight
    module.register_buffer("scale", torch.arange(5.0))
    return module
rank = MPI.COMM_WORLD.rank
torch.manual_seed(rank if drawn == "all" else 0)
first = stage()
modules = [first, stage(first.weight if scheme == "1f1b" else None)]
if drawn == "scale":
    modules[0].scale[4] = rank
if drawn == "order":
    modules[0].scale[:4] = modules[0].scale[:4].roll(2 * rank)
with mpirun.Engine(scheme, modules, loss=torch.nn.functional.mse_loss, microbatches=2) as run:
    run.step((torch.ones(2, 4), torch.ones(2, 4)))
"""
    (done,) = scripts(2, [[script, scheme, drawn]])
    sentence = (
        f"mpirun: ranks 0 and 1 begin with different values of stage 0, {what}: the code that makes them should draw "
        "the same numbers on every rank, as after torch.manual_seed with the same number of threads\n"
    )
    assert (done.code, done.err) == ((0, "") if what is None else (2, sentence))


DRAWN_AGAIN = """
import sys
import mpirun, torch
from mpi4py import MPI
x, found = torch.ones(4, 4), []
for seed in (0, 1 + MPI.COMM_WORLD.rank):
    torch.manual_seed(seed)
    modules = [torch.nn.Linear(4, 4) for _ in range(2)]
    with mpirun.Engine("1f1b", modules, stages=2, microbatches=2, loss=torch.nn.functional.mse_loss) as run:
        loader = run.loader([(torch.ones(4), torch.ones(4))] * 4)
        if not run.resume(sys.argv[1], data=loader):
            run.step(next(iter(loader)))
            run.save(sys.argv[1], data=loader)
        found.append(run.evaluate(loader).loss)
assert found[0] == found[1], found
"""


def test_a_resumed_run_may_draw_other_weights_which_the_checkpoint_replaces(tmp_path, scripts):
    (done,) = scripts(2, [[DRAWN_AGAIN, tmp_path]])
    assert (done.code, done.err) == (0, "")


def test_what_an_optimizer_keeps_is_resumed_as_it_was_saved(tmp_path, scripts):
    """Python numbers, tensors of other shapes and types than the parameter's; what a scheduler sets in groups."""
    script = """
class Odd(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state, gradient = self.state[parameter], parameter.grad.double()
            if not state:
                state.update(decay=1.0, calls=0, begun=False, scale=torch.ones(()).double(), rows=torch.zeros(4, 1, 1))
            state.update(decay=state["decay"] * 0.9, calls=state["calls"] + 1, begun=True)
            state["scale"] *= 0.9
            state["rows"] += gradient.reshape(4, 1, -1).mean(2, keepdim=True)
            parameter -= state["decay"] * gradient + state["scale"] * state["rows"].sum() / state["calls"]
def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and one == other
class Decay(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.1 * self.last_epoch
        return self.base_lrs
for make, scheduler in ((torch.optim.Adafactor, None), (Odd, None), (torch.optim.AdamW, Decay)):
    found = []
    for name, parts in (("whole", (4,)), ("parts", (2, 4))):
        for steps in parts:
            with engine(optimizer=lambda named: make([entry.parameter for entry in named]), scheduler=scheduler) as run:
                run.resume(folder / make.__name__ / name)
                while run.steps < steps:
                    run.step((x, x))
                assert run.save(folder / make.__name__ / name)
                (made,) = run.session.interpreter.optimizer.by_unit.values()
                kept = [value for state in made.optimizer.state.values() for value in state.values()]
                predicted = run.predict([(x, x)])
        found.append([predicted, *kept])
    assert len(found[0]) == len(found[1]) and all(map(same, *found)), found
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    assert (done.code, done.err) == (0, "") and done.out.count("resumed after step 2: ") == 3


def test_options_that_choose_kernels_or_that_are_not_read_may_change(tmp_path, scripts):
    script = """
for steps, switch in ((1, True), (2, False)):
    def adam(named):
        return torch.optim.Adam([{"params": [x.parameter for x in named], "read": switch}], foreach=switch)
    with engine(optimizer=adam) as run:
        run.resume(folder)
        run.step((x, x))
        run.save(folder)
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    assert (done.code, done.err) == (0, "mpirun: note: the checkpoint was made with read True, not read False\n")


def test_what_is_kept_for_a_parameter_without_dimensions_is_resumed_where_weights_are_divided(
    tmp_path, compiled, scripts
):
    script = """
import sys, mpirun, torch
from torch import nn
class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
    def forward(self, x):
        return super().forward(x) * self.scale
def sgd(named):
    return torch.optim.SGD([x.parameter for x in named], 0.1, momentum=0.9)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
found = []
for name, parts in (("whole", (4,)), ("parts", (2, 4))):
    for steps in parts:
        torch.manual_seed(0)
        with mpirun.Engine(sys.argv[1], [Scaled(), Scaled()], loss=nn.functional.mse_loss, optimizer=sgd) as run:
            run.resume(f"{sys.argv[2]}/{name}")
            while run.steps < steps:
                run.step((x, x))
            run.save(f"{sys.argv[2]}/{name}")
            predicted = run.predict([(x, x)])
    found.append(predicted)
assert run.rank or torch.equal(*found)
"""
    schedule = compiled("fsdp", stages=2, microbatches=2, workers=2, shards=2)
    (done,) = scripts(2, [[script, schedule, tmp_path]])
    assert (done.code, done.err) == (0, ""), done.err


def test_options_of_groups_that_a_resumed_run_changes_are_noted_and_switches_refused(tmp_path, scripts):
    """But not where a checkpoint does not have them, as older ones."""
    script = """
import json
def train(steps, lr=0.01, **options):
    def adamw(named):
        of_rows = {True: options, False: {}}
        return torch.optim.AdamW([{"params": [x.parameter], **of_rows[len(x.shape) > 1]} for x in named], lr)
    with engine(optimizer=adamw) as run:
        run.resume(folder)
        while run.steps < steps:
            run.step((x, x))
        run.save(folder)
train(1, weight_decay=0.2)
train(2, weight_decay=0.2)
train(3, weight_decay=0.3)
train(4, torch.tensor(0.5), weight_decay=0.3)
train(5, torch.tensor(0.25), weight_decay=0.3)
assert refused(lambda: train(6, torch.tensor(0.25), weight_decay=0.3, amsgrad=True)) == 2
manifest = folder / "step-00000005" / "manifest.json"
recorded = json.loads(manifest.read_text())
assert recorded.pop("groups") == {"lr": 0.25, "weight_decay": [0.01, 0.3]}
manifest.write_text(json.dumps(recorded))
train(6, torch.tensor(0.125), weight_decay=0.4)
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    notes = [
        "weight_decay [0.01, 0.2], not weight_decay [0.01, 0.3]",
        "lr 0.01, not lr 0.5",
        "lr 0.5, not lr 0.25",
    ]
    refused = f"the optimizer has another amsgrad than that of {tmp_path / 'step-00000005'}, whose state does not fit"
    said = [*(f"note: the checkpoint was made with {words}" for words in notes), refused]
    assert done.err.splitlines() == [f"mpirun: {words}" for words in said]


def test_a_checkpoint_of_a_larger_model_is_refused(tmp_path, scripts):
    script = """
with engine(2) as run:
    run.step((x, x))
    run.save(folder / "saved")
with engine() as run:
    run.resume(folder / "saved")
    run.step((x, x))
"""
    (done,) = scripts(1, [[SAVING + script, tmp_path]])
    what = "no stage has 2 of its entries, such as stage1.bias: is it of a larger model?"
    assert (done.code, done.err) == (2, f"mpirun: {tmp_path / 'saved' / 'step-00000001'}: {what}\n")


def test_what_a_script_draws_is_the_same_on_all_ranks(scripts):
    """A stage with dropout, which one rank has, seeds that rank's generator; the script's draws are as without it."""
    script = """
import torch, mpirun
from torch.nn.functional import mse_loss
stages = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))]
torch.manual_seed(3)
drawn = []
with mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=mse_loss) as run:
    for _ in range(3):
        drawn.append(torch.randn(8, 4))
        run.step((drawn[-1], drawn[-1]))
        run.evaluate([(drawn[-1], drawn[-1])])
torch.manual_seed(3)
print(all(torch.equal(batch, torch.randn(8, 4)) for batch in drawn))
"""
    (done,) = scripts(2, [[script]])
    assert done.code == 0 and done.out.split() == ["True"] * 2, (done.out, done.err)


def test_scripts_that_exit_on_all_ranks_end_with_their_code(scripts):
    """Inside a step, in a function that every rank calls; the Engine is closed then."""
    script = """
import sys, torch, mpirun
from torch.nn.functional import mse_loss
x, stages = torch.zeros(8, 4), [torch.nn.Linear(4, 4) for _ in range(2)]
with mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=mse_loss,
                   lr=lambda step: sys.exit(3) if step else 0.1) as run:
    run.step((x, x))
    run.step((x, x))
"""
    (done,) = scripts(2, [[script]])
    assert (done.code, done.out, done.err) == (3, "", "")


FAILING = """
import os, signal, sys, time, torch, mpirun, mpirun.training.session
from torch.nn.functional import mse_loss
def loss(output, target):
    if sys.argv[1] == "exit" and run.steps:
        sys.exit("enough")
    return mse_loss(output, target) / (run.steps or 1) if sys.argv[1] != "loss" or not run.steps else [][0]
mpirun.training.session.EXIT_APART = 0.5
torch.manual_seed(0)
stages = [torch.nn.Linear(4, 4) for _ in range(2)]
run = mpirun.Engine("1f1b", stages, stages=2, microbatches=2, loss=loss)
if sys.argv[1] == "set-up" and run.rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
run.step((x, x))
if sys.argv[1] == "evaluate":
    run.step((x, x)) if run.rank == 0 else run.evaluate([(x, x)])
if sys.argv[1] == "block":
    try:
        with run:
            [][0]
    except IndexError:
        time.sleep(60)
if sys.argv[1] == "shape":
    for batch in run.loader(lambda step, mb, rng: (torch.zeros(4 + step, 4), torch.zeros(4 + step, 4)), 4):
        run.step(batch)
if sys.argv[1] == "end":
    sys.exit(3) if run.rank == 1 else run.step((x, x))
if run.rank == 0 or sys.argv[1] in ("loss", "exit"):
    run.step((x, x))
[][run.rank]
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("loop", 'fails.py", line 32'),
        ("set-up", r"mpirun: rank 1 on \S+: setting up: asked to leave \(SIGTERM\)\n"),
        ("evaluate", r"rank 0 on \S+ calls step, but rank 1 on \S+ calls evaluate: all ranks"),
        ("end", r"mpirun: rank 0 on \S+ calls step, but rank 1 on \S+ has ended: all ranks call the methods of an E"),
        (
            "shape",
            r"the microbatches of step 3 have shape \(5, 4\), not \(4, 4\) as the first: declare sizes with buckets=",
        ),
        ("block", r"mpirun: rank \d on \S+: IndexError: .* \(at .*fails.py:22\)"),
        ("loss", r"mpirun: rank 1 on .*: line \d+: .*FWD.*: IndexError: .* \(at .*fails.py:7\)"),
        *further(("exit", r"mpirun: rank 1 on .*: line \d+: .*FWD.*: SystemExit: enough \(at .*fails.py:6\)")),
    ],
)
def test_a_script_that_fails_on_one_rank_ends_all_and_says_where(where, words, tmp_path, launch):
    script = tmp_path / "fails.py"
    script.write_text(FAILING)
    done = launch(2, where, program=(str(script),))
    assert done.code != 0 and (where not in ("loop", "loss") or "IndexError" in done.err), done.err
    assert re.search(words, done.err) and "ended without a word" not in done.err, done.err


PADDING_ALONE = """
import copy, math, torch, mpirun
from torch.nn.functional import cross_entropy
class Masked(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(4) == 3, self.low)
class Complex(torch.nn.Linear):
    def forward(self, x):
        return torch.view_as_complex(super().forward(x).view(len(x), 2, 2))
def size(output, target):
    return output.abs().mean()
torch.manual_seed(0)
x, y = torch.randn(6, 4), torch.arange(6) % 3
kinds = (Masked, -math.inf, cross_entropy), (Masked, torch.finfo().min, cross_entropy), (Complex, 0, size)
for kind, low, loss in kinds:
    net = kind(4, 4)
    net.low = low
    run = mpirun.Engine("gpipe", [copy.deepcopy(net)], stages=1, microbatches=2, loss=loss, timeout=0, verify=True,
                        canonical=True, optimizer=lambda named: torch.optim.SGD([p.parameter for p in named], 0.1))
    losses = [run.step(batch).losses for batch in run.loader(list(zip(x, y)), 2)]
    plain = torch.optim.SGD(net.parameters(), 0.1)
    for parts in ((x[:2], y[:2]), (x[2:4], y[2:4])), ((x[4:], y[4:]),):
        plain.zero_grad()
        for data, target in parts:
            (loss(net(data), target) / len(parts)).backward()
        plain.step()
    trained = run.session.interpreter.stages[0].module.parameters()
    print(losses[1][1], run.verify(), all(map(torch.equal, trained, net.parameters())))
    run.close()
"""


def test_a_microbatch_of_padding_alone_changes_nothing_whatever_the_model_returns(scripts):
    """Masked logits, whose sums are not finite, and complex numbers."""
    (done,) = scripts(1, [[PADDING_ALONE]])
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if not line.startswith("verify: ")] == ["0.0 True True"] * 3


SAMPLES_ELSEWHERE = """
import contextlib, io, json, torch, mpirun
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset
class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten(0, 1)
class Turned(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).transpose(0, 1).contiguous()
class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()
class Pairs(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x).flatten(1)
        return y @ y.T
class AsMany(torch.nn.Linear):
    def forward(self, x):
        return self.weight[:2, 0].exp()
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)
def loss(output, target):
    rows = output.shape[-1:] == (4,)
    return cross_entropy(output.view(-1, 4), target.flatten()) if rows else output.mean()
def flat(items):
    return torch.stack([x for x, _ in items]), torch.cat([y for _, y in items])
def train(run, loader):
    return [run.step(batch).loss for batch in loader]
data = list(zip(torch.randn(5, 3, 4), torch.arange(15).view(5, 3) % 4))
whole = data[:4] + data[:2]
evaluate, predict, found = mpirun.Engine.evaluate, mpirun.Engine.predict, {}
for name, do, kind, samples, collate in [
    ("output", train, Flat, data, None), ("target", train, torch.nn.Linear, data, flat),
    ("in a stream", train, Flat, Stream(), None), ("evaluated", evaluate, Flat, data, None),
    ("predicted", predict, Flat, data, None), ("numbers", predict, Mean, whole, None),
    ("turned", predict, Turned, whole, None),
    ("a loss of padding", train, Mean, data, None),
    ("pairs", train, Pairs, data, None), ("as many", evaluate, AsMany, data, None),
    ("pairs in a stream", train, Pairs, Stream(), None),
    ("no pairs padded", lambda *given: train(*given) and evaluate(*given).samples, Pairs, whole, None),
    ("target not used", lambda *given: len(predict(*given)), torch.nn.Linear, data, flat),
    ("none padded in part", lambda *given: train(*given) and len(predict(*given)), Flat, whole, flat),
    ("not so far", lambda *given: evaluate(*given, batches=1).samples, Flat, data, None),
]:
    err = io.StringIO()
    run = mpirun.Engine("gpipe", [kind(4, 4)], stages=1, microbatches=2, loss=loss, timeout=0)
    with contextlib.redirect_stderr(err), run:
        try:
            result = do(run, run.loader(samples, 2, collate=collate))
        except SystemExit as end:
            result = [line for line in err.getvalue().splitlines() if "note:" not in line]
        found[name] = run.steps, result
print(json.dumps(found))
"""


def test_padding_that_cannot_be_taken_off_is_refused(scripts):
    """Outputs and targets that are flattened; before anything is trained, if the number of samples is known."""
    (done,) = scripts(1, [[SAMPLES_ELSEWHERE]])
    assert done.code == 0, done.err
    has = "mpirun: the {} of a microbatch of 2 samples has shape {}, but the last step of an epoch is padded: "
    give = (
        "give tensors with the samples in dimension 0 alone (expand over them what is not by sample), or the loader a "
        'microbatch_size that divides them, or last="drop"'
    )
    output, target, number, pairs, as_many = (
        [has.format(*of) + give]
        for of in (
            ("output", "(6, 4)"), ("target", "(6,)"), ("output", "()"), ("output", "(2, 2), one of 3 samples (3, 3)"),
            ("output", "(2,), one of 3 samples (2,)"),
        )
    )  # fmt: skip
    numbers = ["mpirun: predict: outputs without dimensions cannot be joined: take each of them with each="]
    turned = [
        "mpirun: predict: outputs are joined along dimension 0, but that of 2 samples has shape (3, 2, 4): give "
        "outputs with the samples in dimension 0, or take each of them with each="
    ]
    assert json.loads(done.out) == {
        "output": [0, output], "target": [0, target], "in a stream": [1, output], "evaluated": [0, output],
        "predicted": [0, output], "numbers": [0, numbers], "turned": [0, turned], "a loss of padding": [0, number],
        "target not used": [0, 5], "none padded in part": [2, 18], "not so far": [0, 4], "pairs": [0, pairs],
        "pairs in a stream": [1, pairs], "as many": [0, as_many], "no pairs padded": [2, 6],
    }  # fmt: skip


PADDED_MINIBATCH = """
import torch, mpirun
from torch.nn.functional import mse_loss
data = [(x, x) for x in torch.randn(13, 4)]
model = mpirun.Model([torch.nn.Linear(4, 4)], mse_loss, loss_of="minibatch")
with mpirun.Engine("gpipe", model, stages=1, microbatches=2, timeout=0) as run:
    run.predict(run.loader(data[:8], 1))
    try:
        run.evaluate(run.loader(data[:8], 1))
    except SystemExit as end:
        print(end.code)
    for batch in run.loader(data, 4):
        run.step(batch)
"""


def test_padding_is_refused_whatever_shape_came_first(scripts):
    (done,) = scripts(1, [[PADDED_MINIBATCH]])
    assert done.code == 2 and "the loss is of the whole minibatch, so no microbatch may be padded" in done.err
    assert done.out == "2\n" and "minibatch: take predict(each=) and compute it from the outputs\n" in done.err


PADDED_LATER = """
import sys, torch, mpirun
class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten(0, 1)
def loss(output, target):
    return (output - target.flatten(0, 1)).square().mean()
with mpirun.Engine("1f1b", [torch.nn.Linear(4, 4), Flat(4, 4)], microbatches=2, loss=loss) as run:
    getattr(run, sys.argv[1])(run.loader([(x, x) for x in torch.ones(5, 3, 4)], 2))
"""


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_an_evaluation_whose_last_batch_cannot_be_padded_is_refused_before_it_begins(what, scripts):
    (done,) = scripts(2, [[PADDED_LATER, what]])
    (said,) = [line for line in done.err.splitlines() if "note:" not in line]
    assert done.code == 2 and said.startswith("mpirun: the output of a microbatch of 2 samples has shape (6, 4), but")


SENT = """
import gc, torch, mpirun
from torch.nn.functional import mse_loss
from mpirun.engine.buffers import LocalBuffer
gc.collect()
x = torch.zeros(4, 4)
with mpirun.Engine("fsdp", [torch.nn.Linear(4, 4) for _ in range(2)], microbatches=2, loss=mse_loss) as run:
    run.evaluate([(x, x)] * 3)
    run.predict([(x, x)])
    left = sum(len(found.sends) for found in gc.get_objects() if isinstance(found, LocalBuffer))
    lefts = run.comm.gather(left)
    if lefts:
        print(lefts)
"""


def test_weights_that_an_evaluation_sends_have_been_sent_when_it_ends(scripts):
    (done,) = scripts(2, [[SENT]])
    assert (done.code, done.out) == (0, "[0, 0]\n"), done.err


UNREACHED = """
import torch, mpirun
from torch.nn.functional import mse_loss
class Beside(torch.autograd.Function):
    @staticmethod
    def forward(context, x, unused):
        return x.clone()
    @staticmethod
    def backward(context, gradient):
        return gradient, None
class Half(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.never, self.shared = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    def forward(self, x):
        return Beside.apply(self.used(x.float()), self.never.weight)
torch.manual_seed(0)
first, second = Half(), Half()
second.used = first.shared
x = torch.ones(6, 4)
with mpirun.Engine("zb-h1", [first, second, torch.nn.Linear(4, 4)], stages=3, microbatches=3, loss=mse_loss) as run:
    run.step((x.to(torch.uint16), x))  # no type that pickle knows
    run.step((x.to(torch.uint16), x))
"""


def test_parameters_without_a_gradient_are_named_once(scripts):
    """A parameter that two stages share has a gradient if one of them computes with it."""
    (done,) = scripts(3, [[UNREACHED]])
    (note,) = [line for line in done.err.splitlines() if "note:" in line]
    assert done.code == 0 and "step 1 gives no gradient to stage0.never.weight, stage1.never.weight, stage1.sh" in note


SETS_PARAMETERS = """
import torch, mpirun
from torch.nn.functional import mse_loss
class Shifted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.begun = torch.nn.Parameter(torch.zeros(4)), False
    def forward(self, x):
        if not self.begun:
            self.shift.data.copy_(-x.mean(0))
            self.begun = True
        return x + self.shift
torch.manual_seed(0)
x = torch.ones(4, 4)
with mpirun.Engine("ddp", [torch.nn.Linear(4, 4), Shifted()], stages=2, microbatches=2, loss=mse_loss) as run:
    run.step((x, x))
    run.step((x, x))
"""


def test_parameters_that_a_forward_changes_are_named(scripts):
    """As by an initialization from data: under data parallelism each rank would begin with its own values."""
    (done,) = scripts(2, [[SETS_PARAMETERS]])
    (note,) = [line for line in done.err.splitlines() if "note:" in line]
    assert done.code == 0 and "forwards change the parameters stage1.shift: their copies" in note


SPECTRAL = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
kinds = (nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm)
for normed, split in ((kinds[0], list), (kinds[1], list), (kinds[0], lambda layers: mpirun.split(
        nn.Sequential(*layers), (torch.zeros(2, 4),), stages=2))):
    torch.manual_seed(0)
    layers = [nn.Sequential(normed(nn.Linear(4, 4)), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
    with mpirun.Engine(sys.argv[1], split(layers), stages=2, microbatches=2, loss=mse_loss) as run:
        run.step((torch.ones(4, 4), torch.ones(4, 4)))
"""


@pytest.mark.parametrize("scheme", ["ddp", "1f1b"])
def test_buffers_of_several_ranks_on_which_outputs_depend_are_named(scheme, scripts):
    """Those of spectral norm, which each rank changes by itself under data parallelism; not those of a BatchNorm."""
    (done,) = scripts(2, [[SPECTRAL, scheme]])
    notes = [line.split(" depend on ")[1].split(",")[0] for line in done.err.splitlines() if " depend on " in line]
    named = ["stage0.0.parametrizations.weight.0._v", "stage0.0.weight_u", "0.0.parametrizations.weight.0._v"]
    assert (done.code, notes) == (0, named if scheme == "ddp" else []), done.err


DRAWING = """
import random, sys, numpy as np, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Noise(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.own = kind, torch.Generator().manual_seed(1)
    def forward(self, x):
        scale = {"python": random.random, "numpy": np.random.rand}.get(self.kind, lambda: 1)()
        return x + scale * torch.randn(x.shape, generator=self.own if self.kind == "own" else None)
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(4, 4), Noise(sys.argv[1])), nn.Linear(4, 4)]
with mpirun.Engine(sys.argv[2], layers, microbatches=2 if sys.argv[2] == "1f1b" else None, loss=mse_loss) as run:
    run.step((torch.ones(4, 4), torch.ones(4, 4)))
"""


def test_a_forward_that_draws_from_other_generators_is_named_and_not_redone(scripts, compiled):
    """Nobody seeds them for a microbatch: a RECOMPUTE would draw other numbers than its forward."""
    redone = compiled("1f1b", stages=2, microbatches=2, recompute="all")
    sources = {"own": "a torch.Generator of its own", "python": "Python's random", "numpy": "numpy.random", "torch": ""}
    runs = [(kind, schedule) for kind in sources for schedule in ("1f1b", redone)]
    for (kind, schedule), done in zip(runs, scripts(2, [[DRAWING, *run] for run in runs]), strict=True):
        named = f"stage 0 draws from {sources[kind]}: " in done.err
        refused = f"redoes forwards of stage 0, which draw from {sources[kind]}: " in done.err
        by_itself = bool(sources[kind]) and schedule == "1f1b"
        assert (named, refused, done.code) == (by_itself, bool(sources[kind]) != by_itself, 2 * refused), done.err


ASKING_FOR_VALUES = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    def forward(self, x):
        scores, y = self.gate(x).softmax(-1), torch.zeros_like(x)
        best = scores.argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = torch.where(best == number)[0]
            y = y.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return y
class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1) + torch.from_numpy(x.detach().numpy().cumsum(0))
class Packed(nn.GRU):
    def forward(self, x):
        rows = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1).expand(-1, 3, -1), 3 - torch.arange(len(x)) % 3,
                                                 batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(super().forward(rows)[0], batch_first=True)[0].mean(1)
def model():
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Experts(), Scaled(6, 6), Packed(6, 6, batch_first=True)]
x = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1))
plain = nn.Sequential(*model())
optimizer = torch.optim.SGD(plain.parameters(), 0.1)
for batch in x:
    optimizer.zero_grad()
    for piece in batch.chunk(4):
        (mse_loss(plain(piece), piece) / 4).backward()
    optimizer.step()
expected = sum(mse_loss(plain(piece), piece).item() for piece in x[0].chunk(4)) / 4
with mpirun.Engine("zb-v", model(), stages=4, microbatches=4, loss=mse_loss,
                   optimizer=lambda named: torch.optim.SGD([one.parameter for one in named], 0.1)) as run:
    for batch in x:
        run.step((batch, batch))
    found = run.evaluate([(x[0], x[0])]).loss
if run.rank == 0:
    print(expected, found)
"""


def test_stages_may_ask_for_values(scripts):
    """Experts whose tokens are chosen, a branch on a number, NumPy, packed sequences: as a plain loop trains them."""
    (done,) = scripts(2, [[ASKING_FOR_VALUES]])
    assert done.code == 0, done.err
    expected, found = map(float, done.out.split())
    assert found == pytest.approx(expected, rel=1e-6)


TAKING_NO_ZEROS = """
import torch, mpirun
from torch import nn
from torch.distributions import Normal
def loss(output, target):
    return -Normal(*output).log_prob(target).mean()
class Gaussian(nn.Linear):
    def forward(self, x):
        mean, scale = super().forward(x).chunk(2, -1)
        return mean, nn.functional.softplus(scale)
x = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
for whole in (False, True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), Gaussian(6, 12))
    expected = loss(net(x[0]), x[0]).item()
    stages = mpirun.Model(list(net), loss, loss_of="minibatch") if whole else mpirun.split(net, x[0, :4], stages=2)
    with mpirun.Engine("gpipe", stages, stages=2, microbatches=4, loss=None if whole else loss) as run:
        found = [run.step((batch, batch)).loss for batch in x]
        if not whole:
            run.evaluate([(x[0], x[0])])
    if run.rank == 0:
        print(expected, found[0])
"""


def test_a_loss_may_take_no_zeros(scripts):
    """Such as a likelihood, whose scales are positive: the loss is tried on outputs of the model."""
    (done,) = scripts(2, [[TAKING_NO_ZEROS]])
    assert done.code == 0, done.err
    for line in done.out.splitlines():
        expected, found = map(float, line.split())
        assert found == pytest.approx(expected, rel=1e-6)


FORCES = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() or "always" in sys.argv):
            x = x + torch.zeros_like(x, requires_grad=True)
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
torch.manual_seed(0)
x, stages = torch.randn(8, 6), [nn.Linear(6, 6), Forces()]
expected = mse_loss(nn.Sequential(*stages)(x), x).item()
with mpirun.Engine(sys.argv[1], stages, loss=mse_loss) as run:
    evaluated = run.evaluate([(x, x)]).loss if "always" in sys.argv else expected
    found = run.step((x, x)).loss
    if run.rank == 0:
        print(expected, evaluated, found)
    run.evaluate([(x, x)])
"""


def test_a_forward_may_ask_for_gradients(launch, scripts, compiled):
    """Such as forces of an energy; if it enables them itself, also in evaluations and in recomputed forwards."""
    options = {"stages": 2, "workers": 2, "microbatches": 2}
    saved, redone = compiled("1f1b", **options), compiled("1f1b", **options, recompute="all")
    cases = [(saved, "always"), (redone, "always"), (saved, "in training")]
    *good, at_last = scripts(2, [[FORCES, *case] for case in cases])
    at_once = launch(2, redone, "in training", program=("-c", FORCES))
    for done in (*good, at_last):
        expected, *found = map(float, done.out.split())
        assert found == pytest.approx([expected] * 2, rel=1e-6)
    assert [done.code for done in (*good, at_last, at_once)] == [0, 0, 2, 1], (*good, at_last, at_once)
    hint = "without gradients: a forward may ask for them with torch.enable_grad()"
    refused = at_last.err.splitlines()[-1]
    assert refused.startswith(
        "mpirun: stage 1 fails on the shapes it gets: RuntimeError: element 0 of tensors does not"
    )
    assert refused.endswith(f"evaluations run {hint}")
    assert f"does not have a grad_fn; forwards that are recomputed run at first {hint}" in at_once.err


DIFFERENTIATED = """
import sys, torch, mpirun
class Field(torch.nn.Linear):
    def forward(self, x):
        x = x.requires_grad_()
        return super().forward(x), x
def loss(output, target):
    y, x = output
    slope = 0 if "later" in sys.argv and not x.requires_grad else torch.autograd.grad(y.sum(), x, create_graph=True)[0]
    return (y - target + slope).square().mean()
x = torch.ones(4, 3)
with mpirun.Engine("1f1b", [Field(3, 3)], stages=1, microbatches=2, loss=loss, timeout=0) as run:
    run.step((x, x))
"""


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_loss_that_differentiates_its_outputs_is_refused_in_a_sentence(scripts, when):
    """Also if it does so in training alone, which its trial does not see."""
    (done,) = scripts(1, [[DIFFERENTIATED, when]])
    assert done.code != 0 and "mpirun: the loss differentiates what it gets, but outputs are cut off" in done.err
    assert "Traceback" not in done.err, done.err


CHANGED_DATA = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
def halved(output, target):
    return mse_loss(output, target.mul_(0.5))
x, y = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
with mpirun.Engine(sys.argv[1], [nn.Linear(6, 6), nn.Linear(6, 6)], loss=halved, verify=True, canonical=True) as run:
    whole, targets = torch.empty(8, 6), torch.empty(8, 6)
    for batch in run.loader(list(zip(x, y)), 2):
        run.step(batch)
    for rows in (slice(0, 8), slice(8, 16)):
        run.step((whole.copy_(x[rows]), targets.copy_(y[rows])))
    print(run.evaluate([(whole, targets)]).loss == run.evaluate([(whole, targets)]).loss, run.verify())
"""


def test_the_loss_may_change_its_target_and_the_script_its_batch(scripts, compiled):
    """Also where a forward, and its loss, are done again."""
    schedule = compiled("ddp", workers=1, stages=2, microbatches=4, recompute="all")
    (done,) = scripts(1, [[CHANGED_DATA, schedule]])
    assert done.code == 0 and done.out.split()[-2:] == ["True"] * 2, done.out + done.err


KEYS = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import mse_loss
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, a, b):
        return self.first(a) - 3 * self.second(b)
def swapped(given):
    return dict(reversed(given.items()))
def engine(verify=True):
    torch.manual_seed(0)
    return mpirun.Engine("1f1b", [Two(), nn.Linear(6, 6)], microbatches=2, loss=mse_loss, verify=verify, canonical=True)
a, b, y = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1))
items = [({"a": a[k], "b": b[k]}, y[k]) for k in range(16)]
mixed = [(swapped(x) if k in (2, 3, 4, 5, 14, 15) else x, target) for k, (x, target) in enumerate(items)]
found = []
for data, order in ((items, dict), (mixed, swapped)):
    with engine() as run:
        losses = [run.step(batch).loss for batch in run.loader(data, 2)]
        whole = order({"a": a[:4], "b": b[:4]}), y[:4]
        losses += [run.step(whole).loss, run.evaluate([whole]).loss]
        found.append((losses, run.verify()))
scores = []
for order in (dict, swapped):
    with engine(verify=False) as run:
        loader = run.loader(items, 2)
        if not run.resume(sys.argv[1], data=loader):
            run.step(next(iter(loader)))
            run.save(sys.argv[1], data=loader)
        scores.append(run.evaluate([(order({"a": a[:4], "b": b[:4]}), y[:4])]).loss)
print(found[0] == found[1], found[1][1], scores[0] == scores[1])
with engine(verify=False) as run:  # a line says so
    run.step(({"b": a, "a": b}, y))
with engine() as run:
    for given in ({"a": a, "b": b}, (a, b), {"a": a, "other": b}, {"b": b, "c": a}):  # the last is refused
        run.step((given, y))
"""


def test_keys_in_another_order_are_the_same_input_and_a_key_in_the_place_of_another_is_refused(scripts, tmp_path):
    (done,) = scripts(2, [[KEYS, tmp_path]])
    assert done.code == 2 and done.out.split()[-3:] == ["True"] * 3, done.out + done.err
    said = [line for line in done.err.splitlines() if "note:" not in line or "forward" in line]
    assert said == [
        "mpirun: note: the forward of stage 0 takes a, b, but gets the input's b, a: the entries of a dict go by "
        "position, so give them in the forward's order",
        "mpirun: the input of a microbatch has ['b'], ['c'], but that of the first had ['a'], ['b']",
    ]


OF_OTHER_TYPES = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.zeros(4, 4)
def engine(**options):
    return mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], microbatches=2,
                         **{"loss": mse_loss, "timeout": 0, **options})
def scored(output, target):
    return output.sum(), {"lr": output.sum()}
def of_another(method, given, **options):
    with engine(**options) as other:
        getattr(other, method)(given)
with engine() as run:
    run.step((x, x))
    for refused in (
        lambda: engine(timeout=None), lambda: engine(clip="1"), lambda: engine(buckets=64), lambda: engine(export=3),
        lambda: run.save(None), lambda: of_another("resume", None), lambda: run.export(5), lambda: run.evaluate((x, x)),
        lambda: run.predict({"x": x}), lambda: engine(stages=3), lambda: of_another("step", (x, x), loss=scored),
        lambda: run.resume("nowhere"), lambda: engine(optimizer=torch.optim.Adam([x])),
    ):
        try:
            refused()
        except SystemExit as end:
            print(end.code)
"""


def test_an_argument_that_is_not_what_it_should_be_is_refused_with_one_sentence(scripts):
    (done,) = scripts(1, [[OF_OTHER_TYPES]])
    give = "give the name of a directory, not a"
    assert (done.code, done.out, done.err.splitlines()) == (0, 13 * "2\n", [
        "mpirun: timeout should be a number of at least 0, not None",
        "mpirun: clip should be a positive number, not '1'",
        "mpirun: buckets should be sizes, whole numbers of at least 1, not 64",
        f"mpirun: export: {give} int", f"mpirun: save: {give} NoneType", f"mpirun: resume: {give} NoneType",
        f"mpirun: export: {give} int",
        *["mpirun: this is one batch: give a list of batches, or what loader(...) returns"] * 2,
        "mpirun: the model has 1 stages, not the 3 that it is asked for",
        "mpirun: a metric is called lr, as another number of a step: give it another name",
        "mpirun: resume: this run has done steps already: make a new Engine",
        "mpirun: optimizer: give a class, or a function of a list of NamedParameters, not an object of Adam",
    ])  # fmt: skip


SOME_METRICS = """
import torch, mpirun
def loss(output, target):
    found = output.square().mean()
    return found, {} if target.sum() == 0 else {"size": found}
data = [(torch.ones(4), torch.tensor(number)) for number in numbers]
with mpirun.Engine("1f1b", [torch.nn.Linear(4, 4) for _ in range(2)], microbatches=2, loss=loss) as run:
    run.evaluate(run.loader(data))
"""


@pytest.mark.parametrize(("numbers", "words"), [([1, 0, 1, 1], "[], but ['size']"), ([0, 0, 0, 1], "['size'], but []")])
def test_metrics_that_only_some_microbatches_have_are_refused_by_an_evaluation(numbers, words, scripts):
    (done,) = scripts(2, [[f"numbers = {numbers}{SOME_METRICS}"]])
    sentence = f"mpirun: evaluate: the loss returned the metrics {words} for the first microbatch\n"
    assert (done.code, done.err) == (2, sentence)


STEPS_METRICS = """
import sys, torch, mpirun
from torch.nn.functional import mse_loss
def loss(output, target):
    found = mse_loss(output, target)
    number = run.steps
    if number == 4 and sys.argv[1] == "differ":
        return found, {"of": found} if target.sum() else {}
    names = ("", "a", "ba", "", "c", "c")[number]
    return (found, {name: found * (k + 1) for k, name in enumerate(names)}) if number else found
torch.manual_seed(0)
data, logged = [(row, torch.full((4,), k % 4 // 2.0)) for k, row in enumerate(torch.randn(16, 4))], []
with mpirun.Engine("ddp", [torch.nn.Linear(4, 4) for _ in range(2)], stages=2, microbatches=2, accumulate=2, loss=loss,
                   log=lambda step, numbers: logged.append(numbers), timeout=60) as run:
    loader = run.loader(data[:9] if sys.argv[1] == "padded" else data, microbatch_size=2)
    for step in range(3):
        for batch in loader:
            result = run.step(batch)
            means = {name: round(value / result.loss, 4) for name, value in result.metrics.items()}
            if run.rank == 0:
                assert logged[-1].keys() == {"loss", "grad_norm", "lr", *result.metrics}
                print(means)
"""


def test_metrics_may_have_other_names_in_another_step_but_not_within_one(scripts):
    """The last microbatches of the second epoch's end are padding, and have none."""
    padded, differ = scripts(2, [[STEPS_METRICS, how] for how in ("padded", "differ")])
    means = ["{}", "{'a': 1.0}", "{'a': 2.0, 'b': 1.0}", "{}", "{'c': 1.0}"]
    assert (padded.code, padded.out.splitlines()) == (0, [*means, means[-1]]), padded.err
    assert (differ.code, differ.out.splitlines()) == (1, means[:4])
    sentence = "mpirun: the loss returned the metrics ['of'] for a microbatch of step 5, but [] for another\n"
    assert differ.err == sentence


WITHIN = """
import torch, mpirun
from torch.nn.functional import mse_loss
data = [(x, x) for x in torch.arange(20.0).view(5, 4)]
with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], microbatches=2, loss=mse_loss, timeout=0) as run:
    loader = run.loader(data, shuffle=True)
    for batch in loader:
        run.step(batch)
        print(loader.epoch, loader.step, run.evaluate(loader).samples, run.evaluate(loader, 2).samples)
    print(len(run.predict(loader)), run.steps)
"""


def test_an_evaluation_in_the_middle_of_an_epoch_is_over_all_of_it(scripts):
    (done,) = scripts(1, [[WITHIN]])
    assert (done.code, done.out) == (0, "0 1 5 4\n0 2 5 4\n1 0 5 4\n5 3\n"), done.err


MODULE_S_OUTPUT = """
import torch, mpirun
from torch.nn.functional import mse_loss
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    def forward(self, x):
        between = self.first(x)
        return {"out": self.second(between), "between": between}
def loss(output, target):
    return mse_loss(output["out"], target)
torch.manual_seed(0)
x, net = torch.randn(8, 4), Two()
cut = mpirun.split(net, x[:4], stages=2)
for model, own in ((cut, loss), (cut.model(loss), None), (cut.model(lambda output, _: output["between"].sum()), loss)):
    with mpirun.Engine("1f1b", model, loss=own, microbatches=2, timeout=0) as run:
        found, scored = run.predict([(x, x)]), run.evaluate([(x, x)]).loss
        if run.rank == 0:
            print({name: value.allclose(net(x)[name]) for name, value in found.items()}, end=" ")
            print(abs(scored - loss(net(x), x)).item() < 1e-5)
"""


def test_losses_and_predictions_are_of_the_module_s_own_output_whoever_makes_the_model(scripts):
    (done,) = scripts(2, [[MODULE_S_OUTPUT]])
    assert (done.code, done.out.splitlines()) == (0, ["{'out': True, 'between': True} True"] * 3), done.err


WITHOUT_TARGETS = """
import torch, mpirun
from torch.nn.functional import mse_loss
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], microbatches=2, loss=mse_loss, timeout=0) as run:
    run.step((x, x))
    print(run.predict([(x, None)]).equal(run.predict([(x, x)])))
"""


def test_a_prediction_after_a_step_needs_no_targets(scripts):
    (done,) = scripts(1, [[WITHOUT_TARGETS]])
    assert (done.code, done.out) == (0, "True\n"), done.err


OTHER_LOADER = """
import torch, mpirun
from torch.nn.functional import mse_loss
def engine(scheme, stages):
    return mpirun.Engine(scheme, [torch.nn.Linear(4, 4) for _ in range(stages)], microbatches=2, loss=mse_loss)
torch.manual_seed(0)
data = [(x, x) for x in torch.ones(8, 4)]
with engine("1f1b", 2) as one, engine("1f1b", 2) as alike, engine("ddp", 2) as other:
    print(*other.comm.gather(one.step(next(iter(alike.loader(data, 2)))).tokens) or [], sep="\\n", end="")
    one.step(next(iter(other.loader(data, 2))))
"""


def test_a_loader_of_another_engine_is_taken_where_ranks_read_the_same(scripts):
    (done,) = scripts(2, [[OTHER_LOADER]])
    others = "mpirun: the loader is another Engine's, whose ranks read other microbatches\n"
    assert (done.code, done.out.split(), done.err) == (2, ["16"] * 2, others)


WITHOUT_END = """
import torch, mpirun
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset
class Stream(IterableDataset):
    def __iter__(self):
        return iter([(x, x) for x in torch.ones(8, 4)])
def make(step, microbatch, rng):
    return torch.ones(3, 4), torch.ones(3, 4)
options = {"stages": 1, "microbatches": 2, "loss": mse_loss, "timeout": 0, "verify": True}
with mpirun.Engine("gpipe", [torch.nn.Linear(4, 4)], **options) as run:
    function, stream = run.loader(make, 2), run.loader(Stream(), 2)
    print(run.step(next(iter(function))).tokens)
    print(run.evaluate(function, 3).samples, len(run.predict(function, 1)), run.evaluate(stream).samples)
    for refused in (run.evaluate, run.predict, lambda loader: [run.step(batch) for batch in stream]):
        try:
            refused(function)
        except SystemExit as end:
            print(end.code, run.steps)
"""


def test_data_without_an_end_or_a_second_time_is_refused_at_once(scripts):
    (done,) = scripts(1, [[WITHOUT_END]])
    endless = "mpirun: a function that makes microbatches has no end: say how many steps of it, batches="
    once = "mpirun: verify=True does all steps again, but an IterableDataset is read once: train without it"
    assert (done.code, done.out, done.err) == (0, "24\n18 6 8\n" + 3 * "2 1\n", "\n".join([endless, endless, once, ""]))


# A loss that is a mean over labels, of which microbatches have different numbers. The first has none, and no loss.
LABELS = """
import sys, torch, mpirun
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
scheme, passes, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def layers():
    torch.manual_seed(0)
    return [nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11)]
draw = torch.Generator().manual_seed(1)
tokens, labels = torch.randint(11, (30, 6), generator=draw), torch.randint(11, (30, 6), generator=draw)
labels[torch.rand(30, 6, generator=draw) < 0.4] = -100
labels[:4] = labels[8:12] = -100
def loss(output, target):
    right = (output.argmax(-1) == target)[target != -100]
    assert len(right)
    return cross_entropy(output.flatten(0, 1), target.flatten()), {"accuracy": right.float().mean()}
def numbers(loss, metrics):
    return [loss, metrics["accuracy"]]
one, (first, *rest) = nn.Sequential(*layers()), layers()
run = mpirun.Engine(
    scheme, [first, nn.Sequential(*rest)], stages=2, microbatches=4 // passes, accumulate=passes, canonical=True,
    loss=loss, loss_weight=lambda target: (target != -100).sum(), verify=True,
    optimizer=lambda named: torch.optim.SGD([p.parameter for p in named], 0.1),
)
loader, optimizer = run.loader(TensorDataset(tokens, labels), size), torch.optim.SGD(one.parameters(), 0.1)
for number, batch in enumerate(loader):
    found = run.step(batch)
    part = slice(number * 4 * size, (number + 1) * 4 * size)
    whole, metrics = loss(one(tokens[part]), labels[part])
    optimizer.zero_grad()
    whole.backward()
    norm = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
    optimizer.step()
    ours = [*numbers(found.loss, found.metrics), found.grad_norm]
    torch.testing.assert_close(ours, [*numbers(whole.item(), {"accuracy": metrics["accuracy"].item()}), norm.item()])
found = run.evaluate(loader)
whole, metrics = loss(one(tokens), labels)
torch.testing.assert_close(numbers(found.loss, found.metrics), [whole.item(), metrics["accuracy"].item()])
assert found.samples == 30 and number == 1 and run.verify()
run.close()
"""


@pytest.mark.parametrize("scheme, passes", [("1f1b", 1), ("ddp", 1), ("fsdp", 2), *further(("zb-h1", 2))])
def test_a_mean_over_labels_is_that_of_the_whole_minibatch(scripts, scheme, passes):
    (done,) = scripts(2, [[LABELS, scheme, passes, 4]])
    assert done.code == 0, done.err
    assert len(re.findall("by at most 0$", done.out, re.M)) == 3
    assert "labels of -100" not in done.err


UNWEIGHED = """
import torch, mpirun
from torch.nn.functional import cross_entropy
x, labels = torch.zeros(4, 3), torch.tensor([1, -100, 2, 0])
def steps(scheme, stages=1, **options):
    layers = [torch.nn.Linear(3, 3) for _ in range(stages)]
    with mpirun.Engine(scheme, layers, stages=stages, microbatches=2, loss=cross_entropy, timeout=0, **options) as run:
        run.step((x, labels))
steps("gpipe")
for scheme, weigh in (
    ("gpipe", 3), ("pipedream", len), ("gpipe", lambda target: 0), ("gpipe", lambda target: -1.0),
    ("gpipe", lambda target: target.sum() / 0), ("gpipe", lambda target: "many"),
    ("gpipe", lambda target: target.clamp_(0).sum()),
):
    try:
        steps(scheme, loss_weight=weigh)
    except SystemExit as end:
        print(end.code)
"""


def test_labels_that_are_ignored_are_noted_and_weights_that_are_none_refused(scripts):
    (done,) = scripts(1, [[UNWEIGHED]])
    assert done.code == 0 and done.out == 7 * "2\n"
    refused = "mpirun: loss_weight returned {}: it should be a finite number of at least 0"
    assert done.err.splitlines() == [
        "mpirun: note: targets have labels of -100, which cross_entropy ignores: microbatches count by their samples, "
        "not by their other labels, unless loss_weight counts these",
        "mpirun: loss_weight should be a function of a target, not 3",
        "mpirun: loss_weight: this schedule updates stages one by one, by one microbatch at a time",
        "mpirun: loss_weight: every microbatch of the step has weight 0, so the step has no loss",
        *(refused.format(what) for what in ("-1.0", "tensor(-inf)", "'many'")),
        "mpirun: loss_weight changes its target in place, which the loss gets afterwards: let it take a copy",
    ]
