"""`Engine.profile` measures what the command measures, and leaves the training as it was."""

from __future__ import annotations

import json

from examples import further

from schedgen.cli.main import main as schedgen

# Layers that draw, statistics, an optimizer with state: a profile must change none of them, nor the script's modules.
SCRIPT = """
from unittest import mock
from mpirun.examples import mlp
def modules():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), nn.Linear(8, 4)]
def seen(given):
    parts = [part for stage in given for part in stage.modules()] if isinstance(given, list) else []
    return [(sorted(vars(part)), [*map(id, part.parameters())]) for part in parts]
def trained(scheme, how, profiled):
    torch.manual_seed(0)
    given = {
        "example": modules,
        "loader": modules,
        "split": lambda: mpirun.split(nn.Sequential(*modules()), x[:4], stages=2),
        "bare": lambda: nn.Sequential(*modules()),
        "model": lambda: mlp.tiny(2),
    }[how]()
    options = {"example": (x[:4], x[:4])} if how in ("example", "split", "bare") else {}
    options |= {"loss": None, "text": sys.argv[2], "lr": 1e-3} if how == "model" else {"lr": 0.1}
    with engine(given, scheme, optimizer=torch.optim.Adam, **options) as run:
        batches = [None if how == "model" else (x, x)] if how != "loader" else run.loader(rows, 4, shuffle=True)
        numbers = []
        for step in range(4):
            if profiled and step in (0, 2):
                before = seen(given)
                with mock.patch("mpirun.comm.machine_speed.SIZES", [8, 2**10, 2**20]):
                    run.profile(folder / f"{scheme}-{how}", steps=1)
                assert seen(given) == before
            for batch in batches:
                numbers += [run.step(batch).loss, torch.rand(1).item()]
        return numbers, {name: value.clone() for name, value in run.state_dict().items()}
for case in sys.argv[3:]:
    (numbers, state), (expected, values) = (trained(*case.split("-"), profiled) for profiled in (True, False))
    assert numbers == expected, case
    assert state.keys() == values.keys() and all(torch.equal(state[name], values[name]) for name in values), case
"""
CASES = ["fsdp-example", "pipedream-loader", "gpipe-split", "1f1b-model"]
CASES += further("1f1b-example", "1f1b-loader", "ddp-bare")


def test_a_profile_changes_no_bit_of_what_follows_and_simulate_reads_it(execute, inside, compiled, text, tmp_path):
    execute(2, SCRIPT, tmp_path, text, *CASES)
    schedule = compiled("1f1b", stages=2, microbatches=2)
    for case in CASES:
        if case != "ddp-bare":
            assert schedgen(["simulate", str(schedule), "--profile", str(tmp_path / case), "--json"]) == 0
    command, own = tmp_path / "command", json.loads((tmp_path / "1f1b-model").read_text())
    options = ("--model", "mpirun.examples.mlp:tiny", "--stages", 2, "--text", text, "--steps", 1, "-o", command)
    assert inside(2, [{"arguments": ["profile", *options]}])[0][:2] == (0, "")
    profile = json.loads(command.read_text())
    assert own.keys() == profile.keys()
    times = {"F", "B", "I", "W", "step", "overhead", "machine"}
    assert {key: own[key] for key in own.keys() - times} == {key: profile[key] for key in profile.keys() - times}
    assert all(min(own[key]) > 0 for key in ("F", "B", "I", "W", "step"))


def test_what_cannot_be_profiled_is_said_in_a_sentence(execute, tmp_path):
    script = """
    with contextlib.suppress(SystemExit), engine(layers(2), stages=2) as run:
        run.profile(folder / "none")
    with contextlib.suppress(SystemExit), engine(2) as run:
        run.profile(folder / "none", steps=0)
    with contextlib.suppress(SystemExit), engine(2) as run:
        run.profile(folder)
    """
    ended = execute(2, script, tmp_path)
    assert ended.err.splitlines() == [
        "mpirun: give Engine(example=(input, target)), one microbatch, or make a loader first",
        "mpirun: profile: nothing is measured in 0 steps",
        f"mpirun: profile {tmp_path}: Is a directory",
    ]
