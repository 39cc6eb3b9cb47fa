"""A user's mistake ends all ranks with one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mpi4py import MPI

from mpirun.cli.options import run_options

MLP = "mpirun.examples.mlp:tiny"
OVER = " would be overwritten, but it is read, too: give the output another name"
SEE = " (see python -m mpirun --help)"


class Files(NamedTuple):
    schedule: Path  # of 2 ranks
    text: Path
    folder: Path  # empty


class Mistake(NamedTuple):
    """The arguments of a run, given some files, and how it ends: an exit code and a sentence."""

    arguments: Callable[[Files], list[Any]]
    code: int
    sentence: str | Callable[[Files], str]  # or a regular expression between slashes


def model(name: str, sentence: str) -> Mistake:
    return Mistake(lambda files: [files.schedule, "--text", files.text, "--model", name], 2, sentence)


def option(*words: str, sentence: str) -> Mistake:
    return Mistake(lambda files: [files.schedule, "--model", MLP, *words], 2, f"{sentence}{SEE}")


def over_input(word: str, name: str) -> Mistake:
    """An output option that names an input; other mistakes, which read that input, show that it is unchanged."""

    def arguments(files: Files) -> list[Any]:
        return [files.schedule, "--model", MLP, "--text", files.text, word, getattr(files, name)]

    return Mistake(arguments, 2, lambda files: f"{getattr(files, name)}{OVER}")


def looping(folder: Path) -> Path:
    """A link to itself."""
    if not (folder / "loop").is_symlink():
        (folder / "loop").symlink_to("loop")
    return folder / "loop"


def unwritable(word: str, place: Callable[[Path], object], why: str, called: str | None = None) -> Mistake:
    """A file that cannot be written; the message calls it by its option, unless it is `called` otherwise."""

    def arguments(files: Files) -> list[Any]:
        return ["no-schedule", "--model", MLP, word, place(files.folder)]

    prefix = f"{word} " if called is None else called
    return Mistake(arguments, 2, lambda files: f"{prefix}{place(files.folder)}: {why}")


def text_file(name: str, content: bytes | None, sentence: Callable[[Path], str]) -> Mistake:
    def arguments(files: Files) -> list[Any]:
        if content is not None:
            (files.folder / name).write_bytes(content)
        return [files.schedule, "--model", MLP, "--text", files.folder / name]

    return Mistake(arguments, 2, lambda files: sentence(files.folder / name))


def schedule(name: str, content: Callable[[bytes], bytes] | None, sentence: str) -> Mistake:
    """A schedule file; None: one that is missing."""

    def arguments(files: Files) -> list[Any]:
        if content is not None:
            sound = files.schedule.read_bytes()
            assert content(sound) != sound
            (files.folder / name).write_bytes(content(sound))
        return [files.folder / name, "--model", MLP]

    return Mistake(arguments, 1, lambda files: f"/{re.escape(str(files.folder / name))}{sentence}/")


def change_a_job(data: bytes) -> bytes:
    return data.replace(b'{"op": "FWD", "stage": 1, "mb": 1}', b'{"op": "FWD", "stage": 1, "mb": 0}')


def change_the_generator(data: bytes) -> bytes:
    """Change a byte that has no meaning for a run: only the hash shows it."""
    return data.replace(b'"generator": "schedgen', b'"generator": "schedgem')


MISTAKES = {
    "no such module": model(
        "nowhere:tiny",
        "--model nowhere:tiny: cannot import nowhere: ModuleNotFoundError: No module named 'nowhere'",
    ),
    "no such function": model(
        "mpirun.examples.mlp:huge", "--model mpirun.examples.mlp:huge: mpirun.examples.mlp has no function huge"
    ),
    "no function": model(
        "models_for_tests:not_a_function",
        "--model models_for_tests:not_a_function: models_for_tests has no function not_a_function",
    ),
    "no colon": model("mpirun.examples.mlp", "--model mpirun.examples.mlp: should be MODULE:FUNCTION"),
    "one stage more": model(
        "models_for_tests:one_stage_more",
        "--model models_for_tests:one_stage_more: the model has 3 stages, not the 2 that it is asked for",
    ),
    "a list": model(
        "models_for_tests:returns_a_list",
        "--model models_for_tests:returns_a_list: should return an mpirun.Model, not list",
    ),
    "a model that raises": model(
        "models_for_tests:raises", "--model models_for_tests:raises: raises(2) raised ValueError: no such luck"
    ),
    "stages that do not fit": model(
        "models_for_tests:narrow", r"/stage 1 fails on the shapes it gets: RuntimeError: .+/"
    ),
    "a tuple in a tuple": model(
        "models_for_tests:recurrent",
        "stage 1 should return a tensor or a tuple of them, not a tuple with a tuple in it",
    ),
    "a loss of many numbers": model(
        "models_for_tests:loss_of_many", "the loss should be one number, or a pair of it and a dict of metrics"
    ),
    "a stage that is no module": model(
        "models_for_tests:no_module", "stage 1 of the model should be an nn.Module, not function"
    ),
    # Only one rank builds that stage; the other must learn of it.
    "a stage without values": model(
        "models_for_tests:without_values",
        "stage 1 of the model cannot be built: weight is on the meta device, and no weights give it values",
    ),
    "a batch that raises": model(
        "models_for_tests:batch_raises", r"/.*ValueError: no such batch \(at \S+models_for_tests\.py:\d+\)/"
    ),
    "a text that is missing": text_file("no-text", None, lambda file: f"--text {file}: No such file or directory"),
    "a text that is too short": text_file(
        "short",
        b"x" * 16,  # of context, and none to predict
        lambda file: f"{file}: 16 bytes are too short a text, the model needs 17",
    ),
    "no number": option("--steps", "x", sentence="argument --steps: 'x' is not a whole number of at least 0"),
    "not positive": option("--lr", "0", sentence="argument --lr: '0' is not a positive number"),
    "no pass": option("--accumulate", "0", sentence="argument --accumulate: '0' is not a whole number of at least 1"),
    "momentum of adamw": option("--momentum", "0.9", sentence="--momentum needs --optimizer sgd"),
    "how often, of nothing": option("--every", "1", sentence="--every needs --save"),
    "how many, of nothing": option("--keep", "3", sentence="--keep needs --save"),
    "so many steps, of nothing": option("--trace-steps", "2", sentence="--trace-steps needs --trace"),
    "a limit of nothing": option("--tolerance", "1", sentence="--tolerance needs --verify"),
    "a trace over the schedule": over_input("--trace", "schedule"),
    "metrics over the schedule": over_input("--metrics", "schedule"),
    "metrics over the text": over_input("--metrics", "text"),
    "a profile over the schedule": Mistake(
        lambda files: ["profile", "--model", MLP, "--schedule", files.schedule, "-o", files.schedule],
        2,
        lambda files: f"{files.schedule}{OVER}",
    ),
    "metrics and a trace in one": Mistake(
        lambda files: [
            files.schedule,
            "--model",
            MLP,
            "--trace",
            files.folder / "a",
            "--metrics",
            files.folder / "." / "a",
        ],
        2,
        lambda files: f"two outputs would be written to {files.folder / 'a'}: give each its own name",
    ),
    "metrics in a loop of links": unwritable("--metrics", looping, "Too many levels of symbolic links"),
    "metrics with a name that is too long": unwritable(
        "--metrics", lambda folder: folder / ("x" * 300), "File name too long", ""
    ),
    "a trace below a file": unwritable("--trace", lambda folder: f"{__file__}/trace", "Not a directory"),
    "a graph nowhere": Mistake(
        lambda files: ["graph", "--model", "models_for_tests:raises", "--stages", 2, "-o", "nowhere/graph"],
        2,
        "--output nowhere/graph: No such file or directory",
    ),
    "a graph on a full disk": Mistake(
        lambda files: ["graph", "--model", MLP, "--stages", 2, "-o", "/dev/full"],
        1,
        "--output /dev/full: No space left on device",
    ),
    "nonsense": option("--nonsense", sentence="unrecognized arguments: --nonsense"),
    "no model": Mistake(lambda files: [files.schedule], 2, f"--model is missing{SEE}"),
    "no schedule": Mistake(lambda files: ["--model", MLP], 2, f"FILE is missing{SEE}"),
    "metrics nowhere": Mistake(
        lambda files: [files.schedule, "--model", MLP, "--text", files.text, "--metrics", files.folder / "a" / "b"],
        2,
        lambda files: f"--metrics {files.folder / 'a' / 'b'}: No such file or directory",
    ),
    "a schedule that is missing": schedule("missing", None, ": No such file or directory"),
    "a schedule that is a folder": Mistake(
        lambda files: [files.folder, "--model", MLP], 1, lambda files: f"{files.folder}: Is a directory"
    ),
    **{
        f"no name for {name}": option(f"--{name}", "", sentence=f"--{name}: the file has no name")
        for name in ("text", "metrics", "trace")
    },
    "an empty schedule": schedule("empty", lambda data: b"", ":1: the file ends here, before its end"),
    "a job changed": schedule("job", change_a_job, r":\d+: .*"),
    "a byte of the header changed": schedule(
        "byte",
        change_the_generator,
        r":\d+: the SHA-256 does not match the lines above: the file was damaged or edited",
    ),
    "a newer version": schedule(
        "newer",
        lambda data: data.replace(b'{"schedgen": 2,', b'{"schedgen": 3,'),
        r":1: format version 3 is newer than this schedgen reads \(2\)",
    ),
}


@pytest.fixture(scope="module")
def files(compiled, text, tmp_path_factory) -> Files:
    return Files(compiled("1f1b", stages=2, microbatches=2, workers=2), text, tmp_path_factory.mktemp("mistakes"))


@pytest.fixture(scope="module")
def made(mistakes, files) -> dict[str, Any]:
    """How each mistake ended; all in one launch."""
    return dict(zip(MISTAKES, mistakes(2, [one.arguments(files) for one in MISTAKES.values()]), strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_one_sentence(made, files, name):
    (code, out, err), mistake = made[name], MISTAKES[name]
    assert (code, out) == (mistake.code, "")
    (line,) = err.splitlines()
    expected = mistake.sentence if isinstance(mistake.sentence, str) else mistake.sentence(files)
    if expected.startswith("/") and expected.endswith("/"):
        assert re.fullmatch(f"mpirun: {expected[1:-1]}", line), line
    else:
        assert line == f"mpirun: {expected}"


@pytest.fixture(scope="module")
def sentence(launch):
    """The one sentence that a launch of its own ends with, after `mpirun: `."""

    def sentence(ranks: int | None, code: int, *arguments: object) -> str:
        result = launch(ranks, *arguments)
        assert result.code == code, result
        assert "Traceback" not in result.out + result.err
        assert result.out == ""
        (line,) = result.ours
        return line.removeprefix("mpirun: ")

    return sentence


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_wrong_number_of_ranks(mistakes, files, ranks):
    (ended,) = mistakes(ranks, [[files.schedule, "--model", MLP]])
    assert (ended.code, ended.out) == (2, "") and len(ended.err.splitlines()) == 1
    words = f"{files.schedule} is for 2 ranks, mpiexec -n 2, but this run has {ranks}"
    assert ended.err.startswith(f"mpirun: {words}")


def test_no_mpiexec(sentence, files):
    found = sentence(None, 2, files.schedule, "--model", MLP)
    assert found.startswith(f"{files.schedule} is for 2 ranks, mpiexec -n 2, but this run has 1")


@pytest.mark.parametrize("name", ["a stage without values", "a newer version"])
def test_the_job_ends_with_that_sentence(sentence, made, files, name):
    """mpiexec's exit code is that of the ranks, and nothing else is printed."""
    mistake = MISTAKES[name]
    assert sentence(2, mistake.code, *mistake.arguments(files)) == made[name].err.strip().removeprefix("mpirun: ")


def test_whoever_may_write_to_a_device_may_name_it(launch):
    """Even if the user may not write to the device's folder: root, who may, becomes another user.

    A write-protected file in a folder of theirs is refused.
    """
    check = """if True:
        import os, sys, tempfile
        from schedgen.util.files import check_writable
        folder = tempfile.TemporaryDirectory()
        if not os.getuid():
            os.chown(folder.name, 65534, 65534)
            os.setuid(65534)
        check_writable('-o', '/dev/null')
        with open(f"{folder.name}/old", "w") as old:
            check_writable('-o', old.name)
        os.chmod(old.name, 0o444)
        try:
            check_writable('-o', old.name)
        except Exception as error:
            folder.cleanup()
            sys.exit(str(error).split(": ")[1])
    """
    run = launch(None, program=("-c", check))
    assert (run.code, run.err) == (1, "Permission denied\n")


def test_names_are_absolute_as_the_model_may_change_the_working_directory():
    names = ["--save", "a", "--resume", "../b", "--trace", "/c", "--metrics", "-"]
    options = run_options(MPI.COMM_SELF, ["file", "--model", MLP, *names])
    here = Path.cwd()
    assert (options.save, options.resume) == (f"{here}/a", f"{here}/../b")
    assert (options.trace, options.metrics) == ("/c", "-")


def test_help_is_no_mistake(launch):
    result = launch(None, "--help")
    assert (result.code, result.err) == (0, "")
    for option in ("--model", "--steps", "--text", "--seed", "--verify", "--canonical", "--metrics", "--accumulate"):
        assert option in result.out
