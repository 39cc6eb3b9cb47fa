"""What is refused, and by which sentence: a golden table. `...` in a sentence stands for anything.

The rows are words of a command line, or lines of a script; by ranks and exit code. {two} is a schedule of two ranks,
{text} a text, {folder} an empty folder and so on: tests/mpirun/test_refusals.py makes these files.
"""

from __future__ import annotations

Table = dict[tuple[int, int], dict[str, str]]  # (ranks, exit code) -> what is done -> the sentence

MODEL, TESTS = "--model mpirun.examples.mlp:tiny", "--text {text} --model models_for_tests:"
PROFILE = f"profile {MODEL}"
HELP, PROFILE_HELP = (f" (see python -m mpirun {of}--help)" for of in ("", "profile "))
OVER = "would be overwritten, but it is read, too: give the output another name"
WHOLE = "needs the whole gradient, and this schedule updates stages one by one"

MODELS = {
    "nowhere:tiny": "cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'",
    "mpirun.examples.mlp:huge": "mpirun.examples.mlp has no function huge",
    "mpirun.examples.mlp": "should be MODULE:FUNCTION",
    "models_for_tests:not_a_function": "models_for_tests has no function not_a_function",
    "models_for_tests:one_stage_more": "the model has 3 stages, not the 2 that it is asked for",
    "models_for_tests:returns_a_list": "should return an mpirun.Model, not list",
    "models_for_tests:raises": "raises(2) raised ValueError: no such luck (at ...models_for_tests.py:...: `raise ...",
}
# Stages and batches. Only one rank builds the stage without values; the other must learn of it.
STAGES = {
    "narrow": "stage 1 fails on the shapes it gets: RuntimeError: ...",
    "recurrent": "stage 1 should return a tensor or a tuple of them, not a tuple with a tuple in it",
    "no_module": "stage 1 of the model cannot be built: it should be an nn.Module, not function",
    "without_values": "stage 1 of the model cannot be built: weight is on the meta device, and no weights give it ...",
}
READS = {
    "several": "stage 2 of the model reads stage 0, but in the schedule it does not: compile it with --graph FILE...",
    "reads_too_few": "the model says what 3 stages read, but there are 4",
    "reads_later": "stage 1 of the model reads an output of stage 2, which is not before it",
    "reads_a_number": "stage 1 of the model reads 0, which is no Input and no Value",
    "stage_2_unread": "no stage reads stage 2, and the loss reads the last, 3, alone: join it with stage 3...",
    "reads_no_output": "stage 1 reads output 3 of stage 0, which returns 1",
    "reads_no_leaf": "stage 0 reads leaf 2 of the input, which has 1",
}
SLICED = {
    "drops_in_slices": "stage 0 of the model has slices, but draws random numbers",
    "splits_the_last": "slices stage 1, but only stages before the last can have slices",
    "splits_a_module": "stage 0 of the model has slices: give a function that builds it, not a module",
    "splits_unevenly": "17 inputs of a linear layer do not divide into 2 slices",
    "splits_what_is_tied": "stage 0 of the model has slices, but shares parameters with others",
    "splits_for_a_minibatch_loss": "is of the whole minibatch, and the schedule has slices of",
}
OPTIONS = {
    "--steps x": "argument --steps: 'x' is not a whole number of at least 0",
    "--lr 0": "argument --lr: '0' is not a positive number",
    "--momentum 0.9": "--momentum needs --optimizer sgd",
    "--every 1": "--every needs --save",
    "--keep 2": "--keep needs --save",
    "--trace-steps 2": "--trace-steps needs --trace",
    "--tolerance 1": "--tolerance needs --verify",
    "--nonsense": "unrecognized arguments: --nonsense",
    "--trace {folder}/trace --steps 0": "--trace: there is nothing to trace in 0 steps",
}
COMMANDS: Table = {
    (2, 2): {
        **{f"{{two}} --text {{text}} --model {name}": f"--model {name}: {why}" for name, why in MODELS.items()},
        **{f"{{two}} {TESTS}{name}": why for name, why in STAGES.items()},
        **{f"{{chain}} {TESTS}{name}": f"...{why}" for name, why in READS.items()},
        f"{{two}} {MODEL} --text {{folder}}/none": "--text {folder}/none: No such file or directory",
        f"{{two}} {MODEL} --text {{short}}": "{short}: 16 bytes are too short a text, the model needs 17",
        **{f"{{two}} {MODEL} {words}": f"{why}{HELP}" for words, why in OPTIONS.items()},
        "{two}": f"--model is missing{HELP}",
        MODEL: f"FILE is missing{HELP}",
        f"{{forwards}} {MODEL}": "{forwards} has forwards alone: nothing can be trained by it...",
        f"{{two}} {MODEL} --graphs": "graphs: a CPU launches no kernels that could be captured",
        f"{{two}} {MODEL} --stream-words": "stream words: a CPU has no streams of kernels",
        f"{{two}} {MODEL} --gpu-messages host": "gpu messages host: a CPU has no memory but the host's",
        f"{{two}} {MODEL} --gpu-messages both": "argument --gpu-messages: invalid choice: 'both'...",
        # Outputs. Other rows read {two} and {text}, and show that these are unchanged.
        **{f"{{two}} {MODEL} --{name} ''": f"--{name} names no file: it is empty" for name in ("text", "metrics")},
        **{f"{{two}} {MODEL} --{name} {{two}}": f"{{two}} {OVER}" for name in ("trace", "metrics")},
        f"{{two}} {MODEL} --text {{text}} --metrics {{text}}": f"{{text}} {OVER}",
        f"{{two}} {MODEL} --trace {{folder}}/a --metrics {{folder}}/./a": "two outputs would be written to ...",
        f"{{two}} {MODEL} --metrics {{folder}}/{300 * 'x'}": f"{{folder}}/{300 * 'x'}: File name too long",
        f"{{two}} {MODEL} --trace {{text}}/trace": "--trace {text}/trace: No such file or directory",
        f"{{two}} {MODEL} --trace {{folder}}/none/a": "--trace {folder}/none/a: No such file or directory",
        "graph --model models_for_tests:raises --stages 2 -o none/a": "--output none/a: No such file or directory",
        # Profiles
        f"{PROFILE} -o none/a": f"--stages or --schedule is missing{PROFILE_HELP}",
        f"{PROFILE} --stages 2": f"--output is missing{PROFILE_HELP}",
        "profile --stages 2 -o none/a": f"--model is missing{PROFILE_HELP}",
        f"{PROFILE} --stages 0 -o -": f"argument --stages: '0' is not a whole number of at least 1{PROFILE_HELP}",
        f"{PROFILE} --steps 0 --stages 2 -o -": f"--steps: nothing is measured in 0 steps{PROFILE_HELP}",
        f"{PROFILE} --stages 2 -o none/a": "--output none/a: No such file or directory",
        f"{PROFILE} --stages 2 -o {{folder}}": "--output {folder}: Is a directory",
        f"{PROFILE} --schedule {{two}} -o {{two}}": f"{{two}} {OVER}",
        f"{PROFILE} --stages 3 --schedule {{chain}} -o -": "--stages 3: {chain} has 4",
        f"{PROFILE} --stages 13 -o -": f"{MODEL}: it has 12 layers, too few for 13 stages",
        "profile --model models_for_tests:splits_for_a_minibatch_loss --stages 2 -o -": (
            "a loss of the whole minibatch cannot be profiled: jobs are measured two microbatches at a time"
        ),
        **{f"{{tensor2}} {TESTS}{name}": f"...{why}..." for name, why in SLICED.items()},
        f"{{tensor8}} {TESTS}gpt_tiny": "...compiled with --tensor 2, but no stage of this model defines slices...",
        f"{{tensor8}} {TESTS}gpt_tensor": "the model is replicated in stages 0,7, the schedule in 7: compile it...",
        f"{{1f1b}} {TESTS}contrastive": "the model's loss is of the whole minibatch...as in gpipe...",
        f"{{ddp}} {TESTS}contrastive": "the model's loss is of the whole minibatch...as in gpipe...",
        f"{{pipedream}} {MODEL} --clip 1": f"clip {WHOLE}",
    },
    (2, 1): {
        f"{{folder}}/none {MODEL}": "{folder}/none: No such file or directory",
        f"{{folder}} {MODEL}": "{folder}: Is a directory",
        f"{{empty}} {MODEL}": "{empty}:1: the file ends here, before its end",
        f"{{job}} {MODEL}": "{job}:...: ...",
        f"{{byte}} {MODEL}": "{byte}:...: the SHA-256 does not match the lines above: the file was damaged or edited",
        f"{{newer}} {MODEL}": "{newer}:1: format version 3 is newer than this schedgen reads (2)",
        f"graph {MODEL} --stages 2 -o /dev/full": "--output /dev/full: No space left on device",
        f"{PROFILE} --schedule none -o -": "none: No such file or directory",
    },
    (4, 2): {f"{{two}} {MODEL}": "{two} is for 2 ranks, mpiexec -n 2, but this run has 4..."},
    (1, 2): {f"{{two}} {MODEL}": "{two} is for 2 ranks, mpiexec -n 2, but this run has 1..."},
}

# What scripts begin with, behind engine_scripts.PRELUDE.
SCRIPT = '''
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DistributedSampler

def step(*batches, data=rows, size=2, model=2, scheme="1f1b", **options):
    """Train on these batches, or those of a loader."""
    with engine(model, scheme, **options) as run:
        for batch in batches or run.loader(data, size):
            run.step(batch)

def call(method, *arguments, after=0, **options):
    """A method of an Engine that has done so many steps."""
    with engine(2, **{"scheme": "1f1b", **options}) as run:
        for _ in range(after):
            run.step((x, x))
        return getattr(run, method)(*arguments)

def of_lengths(*lengths):
    """Data whose step k has sequences of lengths[k]."""
    return [(torch.ones(n + (len(lengths) == 1) * k // 2, 4),) * 2 for n in lengths for k in range(4)]

def some_metrics(output, target):
    return output.sum(), {"a": output.sum()} if target[0, 0] > 1 else {}

'''
DIRECTORY = "give the name of a directory, not a"
FIRST = "give Engine(example=(input, target)), one microbatch, or make a loader first"
UNSEEDED = (
    "ranks 0 and 1 give different batches: seed the loader, DataLoader(..., generator=), and what its samples draw, or "
    "use run.loader; or they were made from a module that a rank does not train"
)
BATCH = "this is one batch: give a list of batches, or what loader(...) returns"
WEIGHTS = {
    "0": "loss_weight: every microbatch of the step has weight 0, so the step has no loss",
    **{
        given: f"loss_weight returned {said}: it should be a finite number of at least 0"
        for given, said in {"-1.0": "-1.0", "target.sum() / 0": "tensor(...inf)"}.items()
    },
}
DIFFERENT = {  # options that ranks should agree on, and what they are given
    "seed=rank": "0 and 1",
    "canonical=rank > 0": "False and True",
    "clip=1.0 + rank": "1.0 and 2.0",
    "timeout=60.0 * rank": "0.0 and 60.0",
    "scheduler=(StepLR, ReduceLROnPlateau)[rank]": "...StepLR... and ...ReduceLROnPlateau...",
    "loss=(mse_loss, nn.functional.l1_loss)[rank]": "mse_loss and l1_loss",
}
SCRIPTS: Table = {
    (1, 2): {
        "engine(device='tpu')": "device 'tpu' is none of auto, cpu, cuda...",
        "engine(loss=None)": "loss: say what it is, modules have none...",
        "engine(microbatches=0)": "microbatches 0 is not a whole number of at least 1",
        "engine(loss_of='step')": "loss_of should be microbatch or minibatch, not 'step'",
        "engine(recompute='none')": "recompute 'none' is not 'all', 'except-last', stages, or pairs of a stage...",
        "engine(chunks=2)": "gpipe takes no chunks",
        "engine(scheme='a.json', shards=2)": (
            "a.json is compiled already: give shards to schedgen compile, or with a scheme's name"
        ),
        "engine(scheme='2f2b')": "...2f2b...",
        "engine(threads=0)": "threads 0 is not a whole number of at least 1",
        "engine(stages=3)": "the model has 1 stages, not the 3 that it is asked for",
        "engine(timeout=None)": "timeout None is not a number of at least 0",
        "engine(clip=-1.0)": "clip -1.0 is not a positive number",
        "engine(clip='1')": "clip '1' is not a positive number",
        "engine(autocast='fp8')": "autocast 'fp8' is none of bf16",
        "engine(lr=lambda step: 1.0, scheduler=StepLR)": "lr and scheduler both say what the rate of a step is...",
        "engine(buckets=64)": "buckets should be sizes, whole numbers of at least 1, not 64",
        "engine(buckets=(0,))": "buckets should be sizes, whole numbers of at least 1, not (0,)",
        "engine(mpirun.split(nn.Linear(4, 4), x, stages=1), buckets=(6,))": (
            "buckets: split has traced one shape: give it these buckets=, too"
        ),
        "engine(weights={})": f"weights, if the module does not have them itself: {DIRECTORY} dict",
        "engine(loss_weight=3)": "loss_weight should be a function of a target, not 3",
        "engine(optimizer=SGD(layers(1)[0].parameters()))": (
            "optimizer: give a class, partial(torch.optim.SGD, lr=0.1), or a function of a list of NamedParameters, "
            "not an object of SGD"
        ),
        "step((x, x), model=nn.Bilinear(4, 4, 4), scheme='ddp')": (
            "stage 0 fails on the shapes it gets: TypeError: ... missing 1 required positional argument: 'input2' ...; "
            "the second of a pair is the target: without one, give ((a, b), None)"
        ),
        **{
            f"step((x, x), model=1, scheme='gpipe', loss_weight=lambda target: {weight})": why
            for weight, why in WEIGHTS.items()
        },
        "run = engine()\nrun.close()\nrun.loader(rows, 2)": "the Engine is closed...",
        "with engine() as run, run.trace('outer'), run.trace('inner'):\n    pass": "trace: steps are traced already...",
    },
    (2, 2): {
        "engine(scheme='fslpp')": "fslpp needs workers W and groups G",
        "engine(nn.Linear(4, 4), '1f1b')": ("1f1b gives every worker at least one stage: 2 workers do not fit 1 stage"),
        "step(((x, x), x), (x, x), model=nn.Bilinear(4, 4, 4), scheme='ddp')": (
            "the batch's input is nested as ..., but that of the first was ..."
        ),
        # Optimizers and losses
        "step(optimizer=lambda named: SGD(layers(1)[0].parameters()))": (
            "the optimizer has other parameters than it is given: take those of the NamedParameters"
        ),
        "step((x, x), scheme='pipedream', loss_weight=len)": (
            "loss_weight: this schedule updates stages one by one, by one microbatch at a time"
        ),
        # Batches and loaders
        "call('evaluate', (x, x))": BATCH,
        "call('predict', {'x': x})": BATCH,
        "step((x[:7], x[:7]))": (
            "a batch of 7 samples cannot be cut into 2 microbatches of one size: leave out an epoch's smaller last "
            "batch (drop_last=True), or take run.loader, which pads it"
        ),
        "step((x, x), (x[:4], x[:4]))": (
            "the microbatches of step 2 have shape (2, 4), not (4, 4) as the first: leave out an epoch's smaller..."
        ),
        "step(data=of_lengths(6), buckets=(6, 7), example=None)": (
            "the microbatches of step 1 have shapes (2, 6, 4) and (2, 7, 4): all of one step must have the same..."
        ),
        "step((x, x), (x[:, :3], x), model=mpirun.split(nn.PReLU(), x[:4], stages=1, buckets=(4, 6)), scheme='ddp')": (
            "input [0] of a microbatch is ... of shape (4, 3), but the module was traced on ... of shape (4, 4): ..."
        ),
        "step(data=of_lengths(6, 9), buckets=(6, 8), example=None)": (
            "the microbatches of step 2 have shape (2, 9, 4), not one of buckets=(6, 8)..."
        ),
        "step(data=[*range(100)])": "the dataset's items should be pairs...",
        "call('loader', rows, 0)": "the loader's microbatch_size is 0...",
        # What ranks should agree on
        **{
            f"engine(2, '1f1b', {option})": f"ranks 0 and 1 were given different `{option.split('=')[0]}`: {values}"
            for option, values in DIFFERENT.items()
        },
        "call('loader', rows[rank:])": "ranks 0 and 1 were given different `samples of the dataset`: 8 and 7",
        "with engine(2) as run:\n    run.loader(rows, sampler=DistributedSampler(rows, 2, rank))": (
            "ranks 0 and 1 were given different `order of samples`: ..."
        ),
        # Methods
        "call('save', folder / 'x', example=None)": FIRST,
        "call('resume', folder / 'x', example=None)": FIRST,
        "call('verify')": "verify: say verify=True where the Engine is made",
        "call('save', None, after=1)": f"save: {DIRECTORY} NoneType",
        "call('export', 5)": f"export: {DIRECTORY} int",
        "call('resume', 'none', after=1)": "resume: this run has done steps already: make a new Engine",
        "call('save', folder / 'x', rows, after=1)": "data: give what loader(...) returns, not a list",
        "call('save', folder / 'x', None, 3, {'best': np.float64(1)}, after=1)": "state: give numbers, strings ...",
        "call('save', folder / 'x', None, 3, {'each': lambda: 1}, after=1)": "state: give numbers, strings ...",
        "call('load_state_dict', {'stage0.weight': x[:4], 'other': x})": (
            "load_state_dict: missing: stage0.bias, stage1.bias, stage1.weight; unexpected: other"
        ),
        "call('load_state_dict', {f'stage{k}.{n}': x for k in (0, 1) for n in ('weight', 'bias')})": (
            "load_state_dict: stage0.weight is torch.float32 of shape (8, 4), but the model's is torch.float32 of ..."
        ),
        "call('load_state_dict', {}, verify=True)": "load_state_dict: verify repeats all steps: load before ...",
        "call('resume', folder / 'x', rows)": "data: give what loader(...) returns, not a list",
    },
    (2, 1): {
        "step(data=[(torch.ones(4) * rank, torch.ones(4))] * 8)": (
            "ranks 0 and 1 have got different data for microbatch 0 of step 1: data should depend on the step and ..."
        ),
        **{
            f"step(*[(x + (k == {k}) * rank, x) for k in range(4)], scheme='{scheme}')": f"step {k + 1}: {UNSEEDED}"
            for k, scheme in ((0, "ddp"), (3, "1f1b"))
        },
        "call('evaluate', [(x, x), (x, x + rank)], scheme='ddp')": f"batch 2: {UNSEEDED}",
        "call('evaluate', [(x, torch.ones(8, 4).cumsum(0))], loss=some_metrics)": (
            "the loss returned the metrics [...] for a microbatch of the evaluation, but [...] for another"
        ),
    },
}
