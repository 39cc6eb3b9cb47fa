"""A user's scheme: w and n get the arguments that they ask for, wrong results are refused; `new` writes a file."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

GOOD = """
def w(s, b, d):
    return s % 2, s % 2

def n(s, b, d):
    return b
"""


@pytest.fixture
def scheme(tmp_path):
    """Write a scheme file: the good one, followed by more definitions."""

    def scheme(text="", base=GOOD, name="mine"):
        path = tmp_path / f"{name}.py"
        path.write_text(base + textwrap.dedent(text))
        return path

    return scheme


@pytest.fixture
def compiled(run, tmp_path):
    def compiled(*arguments, stages=4, microbatches=4):
        return run("compile", *arguments, "--stages", stages, "--microbatches", microbatches, "-o", "-")

    return compiled


def w(body):
    return f"def w(s, b, d):\n    {body}\n"


def n(body):
    return f"def n(s, b, d):\n    {body}\n"


# What a user may get wrong, and words that must stand in the sentence. S = 4, B = 4.
WRONG = {
    "w: worker out of range": (w("return 0 * s, s"), ["--workers", "3"], "outside 0..2: 3 for (s=3, b=0, d=F)"),
    "w: weights out of range": (w("return s, 0 * s"), ["--workers", "3"], "weights on a worker outside 0..2: 3"),
    "w: negative worker": (w("return s - 1, s"), [], "-1 for (s=0, b=0, d=F)"),
    "w: a shape that does not fit": (w("return s[:2], s"), [], "shape (2, 1, 1), which does not fit"),
    "w: a float": (w("return s / 2, s"), [], "whole numbers, not float64"),
    "w: booleans": (w("return s > 0, s"), [], "must return numbers"),
    "w: a string": (w("return 'home', s"), [], "must return numbers, not 'home'"),
    "w: None": (w("return None"), [], "must return a pair (weights_worker, compute_worker), not None"),
    "w: half None": (w("return int(s), None"), [], "schedgen: w"),
    "w: no pair": (w("return s"), [], "must return a pair"),
    "w: huge": (w("return s + 10**30, s"), [], "schedgen: w"),
    "w: raises": (w("return s, (0, 1, 2)[int(s)]"), [], "w(s=3, b=0, d=F) raised IndexError"),
    "w: never returns": (w("return w(s, b, d)"), [], "raised RecursionError"),
    "w: exits": (w("raise SystemExit(3)"), [], "schedgen: w"),
    "w: too few arguments": ("def w(s): return s, s\n", [], "w(s=0, b=0, d=F) raised TypeError"),
    "w: W on another worker than I": (w("return 0 * s, 0 * s + (d == 2)") + "split = True\n", [], "W(0, 0)"),
    "n: NaN": (n("return float('nan')"), [], "finite numbers, not nan"),
    "n: NaN for one job": (
        n("return float('nan') if (int(s), b, d) == (1, 2, 1) else b"),
        [],
        "nan for (s=1, b=2, d=B)",
    ),
    "n: a string": (n("return 'soon'"), [], "must return numbers, not 'soon'"),
    "n: a shape that does not fit": (n("import numpy; return numpy.zeros((2, 3))"), [], "does not fit"),
    "n: raises": (n("return 1 // 0"), [], "n(s=0, b=0, d=F) raised ZeroDivisionError"),
    "n: ties in strict mode": (n("return b"), ["--mode", "strict"], "F(0, 0) and F(2, 0) on worker 0 both have n = 0"),
    "n: deadlock": (n("return 8 * b - 4 * d - s"), ["--mode", "strict"], "F(0, 0) on worker 0"),
    "mode: unknown": ("mode = 'eager'", [], "mode 'eager' is none of greedy, strict"),
    "cap: 0": ("def cap(s): return 0", [], "cap(0) must be a whole number of at least 1, not 0"),
    "cap: no function": ("cap = 3", [], "cap(0)"),
    "cap: raises": ("def cap(s): return 4 // (2 - s)", [], "cap(2) raised ZeroDivisionError"),
    # Stages 1 and 2 both feed stage 3 and hold one microbatch each: stage 1 takes 0 first, stage 2 takes 1.
    "cap: a deadlock": (
        "def w(s, b, d): return s, (b % 2 if s == 0 else s + 1)\n"
        + n("return b * (1 - 2 * (s == 2))")
        + "edges = [(0, 1), (0, 2), (1, 3), (2, 3)]\ndef cap(s): return 1",
        [],
        "cap stops the schedule: ",
    ),
    "cap: strict": ("mode = 'strict'\ndef cap(s): return 1", [], "--mode greedy"),
    "split: no bool": ("def split(s): return s", [], "split must be True or False"),
    "unsplit_backward: not split": ("def unsplit_backward(s, b): return True", [], "needs split = True"),
    "unsplit_backward: no function": ("split = True\nunsplit_backward = True", [], "raised TypeError"),
    "unsplit_backward: a number": (
        "split = True\ndef unsplit_backward(s, b): return s",
        [],
        "unsplit_backward must return True or False, not array",
    ),
    "delayed_send: greedy": ("def delayed_send(s, b): return b > 1", [], "needs mode = 'strict'"),
    "delayed_send: a shape that does not fit": (
        f"mode = 'strict'\n{n('return s + 8 * b + 99 * d')}def delayed_send(s, b): return s[:2] > 0",
        [],
        "shape (2, 1), which does not fit (stages, microbatches) = (4, 4)",
    ),
    "delayed_send: two wait for one another": (
        "mode = 'strict'\ndef w(s, b, d): return s % 2, (s + b) % 2\n"
        + n("return 9 * (s > 1) + b + 99 * d * (4 - s)")
        + "def delayed_send(s, b): return b >= 0",
        [],
        "F(1, 0) on worker 1 waits for F(1, 1), F(1, 1) on worker 0 waits for F(0, 1)",
    ),
    "updates: unknown": ("updates = 'sometimes'", [], "is none of flush, stash, vertical, 2bw"),
    "updates: a list": ("updates = ['stash']", [], "is none of flush, stash, vertical, 2bw"),
    "accumulated: 0": ("updates = '2bw'\naccumulated = 0", [], "whole number of at least 1"),
    "edges: backwards": ("edges = [(0, 1), (2, 1), (1, 3)]", [], "edge (2, 1)"),
    "edges: two sinks": ("edges = [(0, 1), (0, 2), (0, 3)]", [], "no stage reads stage 1, and the loss"),
    "edges: a stage too many": ("edges = [(0, 1), (1, 2), (2, 3), (3, 4)]", [], "edge (3, 4)"),
    "edges: no list": ("edges = 3", [], "pairs (producer stage, consumer stage)"),
    "edges: raises": ("def edges(): return 1 // 0", [], "ZeroDivisionError"),
    "edges: asks for arguments": ("def edges(s): return [(s, s + 1)]", [], "edges"),
    "an option nobody gave": ("def w(s, b, d, *, groups): return s, s", [], "give --groups"),
    "an option that nothing takes": ("def n(s, b, d, **sizes): return b", ["--groups", 2], "mine.py takes no --groups"),
    "another than what it takes": ("def cap(s, *, group=2): return 2", ["--replicas", "2,2"], "takes no --replicas"),
    "an option that is none": ("def n(s, b, d, *, color): return b", [], "'color'"),
    "lacks n": ("del n", [], "defines no function n(s, b, d)"),
    "lacks w": ("w = 4", [], "defines no function w(s, b, d)"),
    "n: no function": ("n = 3", [], "n is no function n(s, b, d)"),
    "reads a file that is not there": ("open('costs.txt')", [], "mine.py cannot be loaded: FileNotFoundError: "),
    "raises": ("import no_such_module_anywhere", [], "ModuleNotFoundError"),
    "a syntax error": ("def w(s, b, d) return s", [], "SyntaxError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_user_gets_wrong_is_said_in_one_sentence(name, scheme, compiled, refused):
    text, options, words = WRONG[name]
    assert words in refused(compiled(scheme(text), *options), 2)


# W need not equal S or B: built-in schemes wrap.
@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["ddp", "--workers", 4], {"microbatches": 16}),
        (["fsdp", "--workers", 3], {"stages": 7, "microbatches": 8}),
        (["gpipe", "--workers", 3], {"stages": 8, "microbatches": 5}),
        (["1f1b", "--workers", 2], {"stages": 6, "microbatches": 7}),
        (["lpp", "--workers", 6, "--groups", 3], {"stages": 5, "microbatches": 7}),
        (["fslpp", "--workers", 6, "--groups", 2], {"stages": 7, "microbatches": 9}),
        (["ddp", "--workers", 1], {"stages": 1, "microbatches": 1}),
    ],
)
def test_schemes_wrap(arguments, sizes, compiled):
    result = compiled(*arguments, **sizes)
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out)["scheme"]["workers"] == arguments[2]


@pytest.mark.parametrize("mode", ["greedy", "strict"])
@pytest.mark.parametrize("late", [-9, 0, 10**6])
def test_an_unsplit_backward_has_the_place_of_its_i_whatever_n_says_of_its_w(scheme, compiled, mode, late):
    text = f"""
        mode, split = "{mode}", True
        def w(s, b, d, *, workers): return s % workers, s % workers
        def n(s, b, d): return [10 * b + s, 1000 + 10 * b - s, {late}][d]
        def unsplit_backward(s, b): return True
        """
    whole = text.replace("True\n        def w", "False\n        def w").replace("def unsplit_backward", "def _unused")
    limit = ["--memory-limit", 4] if mode == "greedy" else []
    own, as_whole = (compiled(scheme(each), "--workers", 3, *limit, stages=5, microbatches=7) for each in (text, whole))
    assert json.loads(own.out)["programs"] == json.loads(as_whole.out)["programs"]


def test_a_file_may_choose_the_microbatches_of_an_update(scheme, compiled):
    """As --group does for the built-in scheme; and marks are called one by one where they take no arrays."""
    text = """
        mode, updates, accumulated = "strict", "2bw", 6
        def w(s, b, d): return s, s
        def n(s, b, d, *, stages): return (s if d == 0 else 2 * stages - 1 - s) + 2 * b
        def delayed_send(s, b, *, stages): return s == stages and b > 0
        """
    own, built_in = compiled(scheme(text), microbatches=12), compiled("pipedream-2bw", "--group", 6, microbatches=12)
    assert json.loads(own.out)["lowering"]["accumulated"] == 6
    assert json.loads(own.out)["programs"] == json.loads(built_in.out)["programs"]


@pytest.mark.parametrize(("p", "m"), [(4, 10), (8, 20)])
def test_dualpipe_has_its_authors_bubble(p, m, run, tmp_path):
    """(p/2 - 1)(F&B + B - 3W), where a pair F&B takes as long as both [DeepSeek-AI 2024, DeepSeek-V3, table 2]."""
    file = Path(__file__).parents[2] / "data" / "dualpipe.py"
    sizes = ("--stages", p, "--microbatches", m, "-o", tmp_path / "x.json")
    assert run("compile", file, *sizes) == (0, "", "")
    numbers = json.loads(run("stats", tmp_path / "x.json", "--cost", "F=2,I=2,W=1", "--json").out)
    assert numbers["own_window_bubble"] == (p // 2 - 1) * ((2 + 3) + 3 - 3 * 1)


def test_a_delayed_output_leaves_after_a_backward_that_redoes_its_forward(scheme, compiled):
    text = """
        mode = "strict"
        def w(s, b, d): return s, s
        def n(s, b, d): return 2 * b + s * (d == 0) + (3 - s) * (d == 1)
        def delayed_send(s, b): return (s == 0) & (b == 1)
        """
    result = compiled(scheme(text), "--recompute", "all", stages=2, microbatches=3)
    rows = [(one["op"], one.get("mb")) for one in json.loads(result.out)["programs"][0] if one["op"] != "FREE"]
    sends = [place for place, (op, _) in enumerate(rows) if op == "SEND"]
    assert result.code == 0 and len(sends) == 3
    assert not any(rows[place - 1][0] == "RECOMPUTE" for place in sends), rows


def test_keyword_arguments_receive_the_options(scheme, compiled):
    path = scheme(
        base="",
        text="""
        def w(s, b, d, *, workers, groups):
            assert (workers, groups) == (4, 2)
            return s % workers, (workers // groups * b % workers) + s % (workers // groups)

        def n(s, b, d, *, stages, microbatches, hint=7):
            assert (stages, microbatches, hint) == (3, 5, 7)
            return b

        def cap(s, *, microbatches):
            return microbatches

        def edges(*, stages):
            return [(s, stages - 1) for s in range(stages - 1)]
        """,
    )
    result = compiled(path, "--workers", 4, "--groups", 2, stages=3, microbatches=5)
    assert result.err == ""
    file = json.loads(result.out)
    assert file["scheme"] == {"name": "mine", "workers": 4, "stages": 3, "microbatches": 5, "groups": 2}
    assert file["edges"] == [[0, 2], [1, 2]]


@pytest.mark.parametrize("mode", ["greedy", "strict"])
def test_called_job_by_job_gives_the_same_bytes(mode, tmp_path, compiled):
    vectorised = """
import numpy as np

def w(s, b, d):
    return s % 3, np.where(d == 0, (2 * b % 4) + s % 2, b % 4)

def n(s, b, d):
    return b * 100 + np.where(d == 0, s, 99 - s)
"""
    one_by_one = """
def w(s, b, d):
    if d == 0:
        return [int(s) % 3, (2 * b % 4) + s % 2]
    return s % 3, b % 4

def n(s, b, d):
    return b * 100 + (s if d == 0 else 99 - s)
"""
    results = []
    for folder, text in (("a", vectorised), ("b", one_by_one)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
        results.append(compiled(tmp_path / folder / "mine.py", "--mode", mode, microbatches=8))
    assert results[0].out == results[1].out and results[0][::2] == (0, "")
    notes = results[1].err.splitlines()
    assert [note.split(" takes no arrays ")[0] for note in notes] == ["schedgen: note: w", "schedgen: note: n"]
    assert all("np.where" in note for note in notes)


def test_the_papers_definitions_are_one_liners(scheme, compiled, golden):
    """A user's file with the paper's formula of lpp compiles to the built-in scheme's instructions."""
    path = scheme(
        base="",
        text="""
        R, W, S = 2, 4, 4
        def h(s, b): return (R * b % W) + (s % R)
        def w(s, b, d): return h(s, b), h(s, b)
        def n(s, b, d): return b * 2 * S + s * (d == 0) + (2 * S - 1 - s) * (d == 1)
        """,
    )
    own = json.loads(compiled(path, "--workers", 4, microbatches=8).out)
    assert own["programs"] == json.loads(golden["lpp"])["programs"]


@pytest.mark.parametrize(
    "text",
    [
        "def w(s, b, d): return s, 1 if b in {} else 0",
        "def w(s, b, d): return s, (s + (1 if b in {} else 0)) % 4",
        "def n(s, b, d): return -1 if b in {} else b",
        "def n(s, b, d): return np.where(d == 0, b + s - 50 * (b in {}), b + 8 - s)",
        "split = True\ndef unsplit_backward(s, b): return (b in {}) | (s < 0)",
        "def n(s, b, d): return b + (s.max() - s) * (d == 1)",
        "def n(s, b, d): return np.argsort(np.argsort(np.ravel(b * 8 + s + d))).reshape(np.shape(b + s + d))",
    ],
)
def test_what_arrays_answer_for_all_jobs_at_once_is_refused(text, scheme, compiled, refused):
    """`b in array` is one answer for all microbatches; with a list it raises, and jobs are asked one by one."""
    arrays, numbers = (text.replace("{}", b) for b in ("np.array([66])", "[66]"))
    own = compiled(scheme(f"import numpy as np\n{arrays}"), "--workers", 4, microbatches=70)
    assert " for this job alone, but another in arrays of all jobs: " in refused(own, 2)
    if numbers != arrays:
        assert compiled(scheme(f"import numpy as np\n{numbers}"), "--workers", 4, microbatches=70).code == 0


def test_a_large_schedule_s_function_is_compared_on_few_jobs(scheme, compiled):
    """Such as one that makes its table in every call."""
    n = "import sys\ndef n(s, b, d):\n    sys.stderr.write('called ')\n    return b + 2.5 * s + d"
    result = compiled(scheme(n), microbatches=1000)
    assert result.code == 0 and result.err == "called " * 65


@pytest.mark.parametrize(
    ("S", "B", "W"), [(1, 1, None), (1, 4, 1), (4, 8, None), (8, 8, 4), (5, 3, 2), (2, 9, 1), (3, 2, 5)]
)
def test_what_it_writes_compiles_for_any_sizes(S, B, W, run, tmp_path):
    result = run("new", tmp_path / "mine")
    assert (result.code, result.err) == (0, "") and str(tmp_path / "mine.py") in result.out
    workers = () if W is None else ("--workers", W)
    sizes = ("--stages", S, "--microbatches", B, *workers)
    assert run("compile", tmp_path / "mine.py", *sizes, "-o", tmp_path / "mine.json") == (0, "", "")
    assert run("check", tmp_path / "mine.json").code == 0
    scheme = json.loads(run("stats", tmp_path / "mine.json", "--json").out)["scheme"]
    assert scheme == {"name": "mine", "workers": W or S, "stages": S, "microbatches": B}


def test_it_is_one_forward_one_backward(run, golden, tmp_path):
    run("new", tmp_path / "mine")
    (tmp_path / "1f1b.json").write_text(golden["1f1b"])
    sizes = ("--stages", 4, "--microbatches", 8)
    assert run("compile", tmp_path / "mine.py", *sizes, "--prefetch", 0, "-o", tmp_path / "mine.json").code == 0
    out = run("diff", tmp_path / "mine.json", tmp_path / "1f1b.json").out
    assert "@@" not in out and out.startswith("name: mine -> 1f1b\n")


def test_its_first_lines_say_how_to_compile_it(run, tmp_path):
    run("new", tmp_path / "mine.py")
    words = (tmp_path / "mine.py").read_text()
    assert words.startswith('"""mine: ') and "schedgen compile mine.py --stages 4" in words
    assert "NAME" not in words


def test_it_overwrites_nothing(run, refused, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    assert "is there already" in refused(run("new", tmp_path / "mine"), 1)
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert "nowhere" in refused(run("new", tmp_path / "nowhere" / "mine"), 1)
    for name in ("", ".py", "a\nb", "a b", 'a"', "a\\", "-a"):
        assert "the name should be letters" in refused(run("new", "--", name), 2)


def test_a_file_imports_others_of_its_folder(run, tmp_path):
    (tmp_path / "placed_elsewhere.py").write_text("def w(s, b, d):\n    return s + 0 * b, s + 0 * b\n")
    (tmp_path / "own.py").write_text("from placed_elsewhere import w\n\n\ndef n(s, b, d):\n    return b\n")
    assert run("compile", tmp_path / "own.py", "--stages", 2, "--microbatches", 2, "-o", tmp_path / "out").code == 0
