"""compare: every scheme that fits, and a user's own, with the numbers that compiling them gives."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from schedgen.schemes import SCHEMES

SIZES = ("--stages", "8", "--microbatches", "8", "--workers", "4")
SMALL = ("--stages", "4", "--microbatches", "4", "--workers", "2")


@pytest.fixture(scope="module")
def comparison(run):
    result = run("compare", *SIZES, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


@pytest.fixture(scope="module")
def small(run):
    return json.loads(run("compare", *SMALL, "--json").out)


def label(row):
    return row["scheme"] if row["groups"] is None else f"{row['scheme']} G={row['groups']}"


def test_every_scheme_is_there_or_left_out_for_a_reason(comparison):
    shown, left = [label(row) for row in comparison["schemes"]], [scheme["scheme"] for scheme in comparison["left_out"]]
    assert len(set(shown + left)) == len(shown + left)
    groups = [f"{name} G={G}" for name in ("lpp", "fslpp") for G in (1, 2, 4)]
    assert set(shown + left) == {*groups, *SCHEMES} - {"lpp", "fslpp"}
    assert left == ["zb-h1", "zb-h2", "chimera", "1f1b-rr", "pipedream", "pipedream-2bw"]  # one stage a worker
    assert all("8" in scheme["reason"] for scheme in comparison["left_out"])


def test_a_row_is_what_its_command_gives(comparison, run, tmp_path):
    for row in comparison["schemes"][::4]:
        command = shlex.split(row["command"].replace("FILE", str(tmp_path / "one.json")))
        assert command[0] == "schedgen" and run(*command[1:]) == (0, "", "")
        numbers = json.loads(run("stats", tmp_path / "one.json", "--json").out)
        for what in ("latency", "bubble", "gap", "peak_activations"):
            assert row[what] == numbers[what], (row["command"], what)
        workers = numbers["workers"]
        assert row["weights"] == max(worker["weight_storage"] + worker["peak_memory"]["weight"] for worker in workers)
        assert row["activation_traffic"] == sum(worker["activation_receives"] for worker in workers)


def test_every_scheme_is_compared_in_replicas(run):
    sizes = ("--stages", 4, "--microbatches", 8, "--workers", 8, "--replicas", 2)
    rows = json.loads(run("compare", *sizes, "--json").out)["schemes"]
    assert {"ddp", "1f1b", "zb-h1", "pipedream"} <= {row["scheme"] for row in rows}
    assert all("--workers 8 --replicas 2" in row["command"] for row in rows)


def test_the_shortest_comes_first_and_the_best_are_marked(comparison):
    rows = comparison["schemes"]
    keys = [(row["latency"], row["peak_activations"], row["weights"]) for row in rows]
    assert keys == sorted(keys)
    for row, key in zip(rows, keys, strict=True):
        beaten = any(other != key and all(o <= k for o, k in zip(other, key, strict=True)) for other in keys)
        assert row["best"] != beaten
    # The seed's Table 1: FSDP has DDP's latency and activations, and a W-th of its weights besides what it fetches.
    ddp, fsdp = (next(row for row in rows if row["scheme"] == name) for name in ("ddp", "fsdp"))
    assert (ddp["latency"], ddp["weights"], ddp["activation_traffic"]) == (48, 8, 0)
    assert (fsdp["latency"], fsdp["weights"]) == (48, 8 // 4 + 2)
    assert ddp["weight_traffic"] == 8 * 2 * 3  # a ring of 4 for each of 8 stages


def test_a_limit_holds_greedy_orders_back_and_leaves_others_out(run, tmp_path):
    comparison = json.loads(run("compare", *SMALL, "--memory-limit", "4", "--json").out)
    rows = {label(row): row for row in comparison["schemes"]}
    assert all(row["peak_activations"] <= 4 for row in rows.values())
    assert {"scheme": "gpipe", "reason": "it holds 8 activations, more than --memory-limit 4"} in comparison["left_out"]
    assert rows["depth-first"]["command"].endswith("--memory-limit 4 -o FILE")
    assert "--memory-limit" not in rows["v-min"]["command"]
    command = shlex.split(rows["depth-first"]["command"].replace("FILE", str(tmp_path / "one.json")))
    assert run(*command[1:]).code == 0
    assert json.loads(run("stats", tmp_path / "one.json", "--json").out)["latency"] == rows["depth-first"]["latency"]


def test_on_a_machine_rows_are_what_simulate_says(run, refused, tmp_path):
    level = {"name": "host", "alpha": 0.1, "beta": 0.01}
    machine, profile, file = tmp_path / "machine.json", tmp_path / "profile.json", tmp_path / "FILE"
    machine.write_text(json.dumps({"levels": [level], "memory": 500}))
    by_stage = {"F": [1, 2, 1, 1], "B": [2, 4, 2, 2], "I": [1, 2, 1, 1], "W": [1, 2, 1, 1]}
    profile.write_text(json.dumps({**by_stage, "weight": 40, "saved": 10}))
    costs = ("--profile", profile, "--machine", machine)
    found = json.loads(run("compare", *SMALL, *costs, "--json").out)
    ends = [row["makespan"] for row in found["schemes"]]
    assert ends == pytest.approx(sorted(ends)) and {row["scheme"] for row in found["schemes"]} > {"fsdp", "lpp", "zb-v"}
    assert any(each["scheme"] == "ddp" and "its device has 500" in each["reason"] for each in found["left_out"])
    for row in found["schemes"]:
        assert run(*shlex.split(row["command"].replace("-o FILE", f"-o {file}"))[1:]).code == 0
        simulated = json.loads(run("simulate", file, *costs, "--json").out)
        assert all(row[name] == simulated[name] for name in ("latency", "bubble", "makespan")) and row["gap"] is None
    assert "makespan" in run("compare", *SMALL, "--beta", 0.1).out.splitlines()[0]
    assert "F has 4 numbers" in refused(run("compare", *SIZES, *costs), 1)


def test_the_table_says_the_same(small, run):
    result = run("compare", *SMALL)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0].split()[:3] == ["scheme", "latency", "bubble"]
    count = len(small["schemes"])
    for line, row in zip(lines[1 : count + 1], small["schemes"], strict=True):
        best, name, latency = re.match(r"(\*| )  (\S+(?: G=\d)?) +(\S+)", line).groups()
        assert (best == "*", name, float(latency)) == (row["best"], label(row), row["latency"])
    assert [line.split(": ")[1] for line in lines[count + 2 :]] == [scheme["scheme"] for scheme in small["left_out"]]


ROUND = "def w(s, b, d, *, workers): return s % workers, s % workers\ndef n(s, b, d): return b\n"
OWN = {
    "lpp.py": ROUND,
    "versions.py": "updates = 'stash'\n" + ROUND,
    "halves.py": "split = True\n" + ROUND,
    "away.py": "split = True\n" + ROUND.replace("workers, s", "workers, (s + (d > 0))"),  # backwards on another worker
    "chain.py": "edges = [(0, 1), (1, 2), (2, 3)]\n" + ROUND,
    "a$b$ c.py": "mode = 'strict'\n" + ROUND.replace("return b", "return b * 10 + s * (d == 0) + (1000 - s) * (d > 0)"),
    "slow.py": "def w(s, b, d): return (0, 0) if s < 2 else (1, 1)\ndef n(s, b, d): return b\n",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a file into the test's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return lambda name, text: (tmp_path / name).write_text(text)


def test_files_are_rows_beside_all_built_in_schemes(write, small, run):
    for name, text in OWN.items():
        write(name, text)
    assert run("compile", "zb-v", "--stages", 4, "--microbatches", 4, "-o", "zb-v.json").code == 0
    assert run("export", "zb-v.json", "--to", "torch-jobs", "-o", "zb-v.csv").code == 0
    files = [*OWN, "zb-v.csv"]
    for cost in ((), ("--cost", "F=1,B=3,R=0")):
        done = run("compare", *files, "lpp.py", *SMALL, *cost, "--json")
        table = json.loads(done.out)["schemes"]
        assert sorted(map(label, table)) == sorted([*files, *map(label, small["schemes"])]) and done.code == 0
        rows = {row["scheme"]: row for row in table}
        assert done.err.startswith("schedgen: note: w takes no arrays ") and done.err.count("\n") == 1
        for name in files:
            assert run(*shlex.split(rows[name]["command"].replace("FILE", "x.json"))[1:]).code == 0
            numbers = json.loads(run("stats", "x.json", "--json").out)
            for what in ("latency", "bubble", "gap", "peak_activations"):
                assert rows[name][what] == numbers[what], (name, what)
    assert rows["versions.py"]["weights"] > rows["lpp.py"]["weights"]  # old versions are weights, too
    assert rows["zb-v.csv"]["latency"] == rows["zb-v"]["latency"]
    assert "--cost F=1,I=1.5,W=1.5,R=0 " in rows["away.py"]["command"]  # it redoes its forwards


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gpip", "", "there is no scheme 'gpip' (a file would end in .py or .csv); did you mean gpipe?"),
        ("x.py", "edges = [(0, 2), (1, 2), (2, 3)]\n" + ROUND, "has edges of its own, but "),
        ("x.py", ROUND.replace("workers", "groups"), "w asks for 'groups': give --groups, or a default value"),
        ("x.py", ROUND.replace("% workers", ""), "w puts weights on a worker outside 0..1: 2 for "),
        ("x.py", ROUND.replace("return b", "raise ValueError(8)"), "n(s=0, b=0, d=F) raised ValueError: 8"),
        ("x.csv", "0F0,0B0\n", "has its own sizes: compare it with --stages 1 --microbatches 1 --workers 1"),
    ],
    ids=["no file", "edges", "groups", "workers", "raises", "sizes"],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(name, text, said, write, run, refused):
    write(name, text)
    assert said in refused(run("compare", name, *SMALL), 2)
