"""Machine files on the command line: what they say reaches the numbers, and what is wrong is said in a sentence."""

from __future__ import annotations

import json

import pytest

HOST = {"name": "host", "devices": 2, "alpha": 0.01, "beta": 1e-3}
NETWORK = {"name": "network", "alpha": [[0, 0.5], [100, 1.5]], "beta": 1e-2, "card": 2e-2}
TWO_HOSTS = {"levels": [{**HOST, "devices": [2, 2]}, NETWORK]}


@pytest.fixture
def schedule(run, tmp_path):
    file = tmp_path / "ddp.json"
    assert run("compile", "ddp", "--workers", 4, "--stages", 2, "--microbatches", 4, "-o", file).code == 0
    return file


def written(folder, machine):
    file = folder / "machine.json"
    file.write_text(machine if isinstance(machine, str) else json.dumps(machine))
    return file


def makespan(run, *options):
    result = run("simulate", *options, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)["makespan"]


def test_hosts_and_slow_devices_take_their_time(run, schedule, tmp_path):
    costs = ("--cost", "F=1,B=2", "--weight", 600)
    flat = makespan(run, schedule, *costs, "--alpha", 0.01, "--beta", 1e-3)
    machine = written(tmp_path, TWO_HOSTS)
    hosts = makespan(run, schedule, *costs, "--machine", machine)
    # Two sums of 600 bytes each put 1,200 through a host's card; the first is hidden behind a backward of 2. Each piece
    # of 150 bytes arrives after 1.5, twice; NORM takes a round inside the hosts and one between them.
    assert flat == pytest.approx(6 + 2 * 0.9 - min(0.9, 2) + 0.02 + 0.02)
    assert hosts == pytest.approx(4 + 2 * 24 + 2 * 1.5 + 0.01 + 0.5)
    slow = makespan(run, schedule, *costs, "--machine", machine, "--slow", "3=2")
    assert slow == pytest.approx(hosts + 4)


def test_a_topology_is_short_for_a_machine_file(run, schedule, tmp_path):
    levels = [{"name": "host", "devices": 2, "alpha": 0, "beta": 1e-3}]
    levels.append({"name": "network", "alpha": 0, "beta": 1e-2, "card": 1e-2})
    costs = ("--cost", "F=1,B=2", "--weight", 600)
    short = makespan(run, schedule, *costs, "--topology", "2x2", "--bandwidth", "1000,100")
    assert short == makespan(run, schedule, *costs, "--machine", written(tmp_path, {"levels": levels}))


def test_a_profile_names_its_machine_and_another_replaces_it(run, schedule, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"F": 1, "B": 2, "weight": 600, "machine": TWO_HOSTS}))
    with_machine = makespan(run, schedule, "--profile", profile)
    other = written(tmp_path, {"levels": [{**HOST, "devices": 4}]})
    assert makespan(run, schedule, "--profile", profile, "--machine", other) < with_machine


@pytest.mark.parametrize("levels", [[[2, 2, 2, 2], 4, 0], [2, [4, 4], 0], [[2, 2, 2, 2], [4, 4], 8], [2, 4, 0]])
def test_levels_may_be_numbers_or_lists(run, schedule, tmp_path, levels):
    listed = [{**NETWORK, "name": str(k), **({"devices": each} if each else {})} for k, each in enumerate(levels)]
    del listed[0]["card"]
    ends = {makespan(run, schedule, "--weight", 600, "--machine", written(tmp_path, {"levels": listed}))}
    three = [[2, 2, 2, 2], [4, 4], 0]
    same = [{**each, **({"devices": count} if count else {})} for each, count in zip(listed, three, strict=True)]
    if not levels[-1]:
        ends.add(makespan(run, schedule, "--weight", 600, "--machine", written(tmp_path, {"levels": same})))
    assert len(ends) == 1


def test_another_bandwidth_keeps_devices_and_alphas(run, tmp_path):
    profile = tmp_path / "profile.json"
    machine = {**TWO_HOSTS, "speed": [1, 1, 1, 0.1]}
    profile.write_text(json.dumps({"F": [1] * 4, "B": [2] * 4, "weight": 10, "machine": machine}))
    plan = ("plan", profile, "--workers", 4, "--microbatches", 4, "--schemes", "1f1b", "--json")
    slow = json.loads(run(*plan, "--bandwidth", 100).out)["schedules"][0]
    assert slow["step_time"] > 30 and slow["layers"] != [1, 1, 1, 1]


def test_plan_and_search_keep_to_the_devices_memory(run, refused, tmp_path):
    profile, machine = tmp_path / "profile.json", written(tmp_path, {**TWO_HOSTS, "memory": [1e3, 1e3, 1e3, 900]})
    profile.write_text(json.dumps({"F": [1] * 4, "B": [2] * 4, "saved": 100, "activation": 10, "weight": 10}))
    plan = ("plan", profile, "--workers", 4, "--microbatches", 8, "--machine", machine, "--schemes", "1f1b", "--json")
    assert max(row["peak_bytes"] for row in json.loads(run(*plan).out)["schedules"]) <= 900
    small = written(tmp_path, {**TWO_HOSTS, "memory": 100})
    assert run("compile", "1f1b", "--stages", 4, "--microbatches", 4, "-o", tmp_path / "1f1b.json").code == 0
    result = run("simulate", tmp_path / "1f1b.json", "--saved", 100, "--machine", small)
    assert result.code == 0 and "rank 0 needs 407 bytes; its device has 100" in result.err
    sizes = ("--stages", 4, "--microbatches", 4, "--cost", "F=1,B=2", "--saved", 100)
    assert "no order within the memory limit" in refused(run("search", "1f1b", *sizes, "--machine", small), 2)


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ("[]", "a machine is an object with a list of levels"),
        ({"levels": []}, "a machine is an object with a list of levels"),
        ({"levels": [HOST], "hosts": 2}, "there is no 'hosts', only levels, speed, memory, host"),
        ({"levels": [{**HOST, "latency": 1}]}, "level 0: there is no 'latency', only name, devices, alpha, beta, card"),
        ({"levels": [{**HOST, "beta": -1}]}, 'level 0: should be {"name": text, '),
        ({"levels": [{**HOST, "alpha": [[1, 2]]}]}, 'level 0: should be {"name": text, '),
        ({"levels": [{"name": "host", "alpha": 0}]}, 'level 0: should be {"name": text, '),
        ({"levels": [{**HOST, "devices": 10**9}]}, "with times of at least 0 and up to 1048576 devices"),
        ({"levels": [{**HOST, "card": 1}]}, "level 0: the innermost level has no card"),
        ({"levels": [{"name": "host", "alpha": 0, "beta": 0}, NETWORK]}, "level 0: devices is missing"),
        (
            {"levels": [HOST, {**NETWORK, "devices": 3}, {**NETWORK, "name": "racks"}]},
            "the groups of level 'network' divide some of level 'host'",
        ),
        ({"levels": [HOST, {**NETWORK, "devices": 2}]}, "it joins no two groups of 'host'"),
        ({"levels": [{**HOST, "devices": [2]}]}, "the machine has 2 devices, but there are 4 workers"),
        ({"levels": [HOST], "speed": [1, 0.5]}, "the machine has 2 devices, but there are 4 workers"),
        ({**TWO_HOSTS, "speed": [1, 1]}, "the numbers of devices differ: 4 by level 'host', 2 by speed"),
        ({"levels": [{**HOST, "devices": [2, 2]}]}, "level 0: the last level joins all devices: give their number"),
        ({"levels": [{**HOST, "devices": 3}]}, "the machine has 3 devices, but there are 4 workers"),
        ({**TWO_HOSTS, "host": {"gamma": 1}}, "host: there is no 'gamma', only alpha, beta, devices, memory"),
        ({**TWO_HOSTS, "host": {"devices": 4}}, "4 devices that share a link lie in several hosts"),
        ({**TWO_HOSTS, "host": {"beta": -1}}, "none below 0"),
        ({**TWO_HOSTS, "host": {"memory": [1e9, 1e9]}}, "numbers, none below 0"),
        ({**TWO_HOSTS, "host": {"memory": 0}}, "memory above"),
        ({**TWO_HOSTS, "host": {"devices": 0}}, "none below 0"),
        ({**TWO_HOSTS, "speed": [1, 1, 2, 1]}, "speed should be a number above 0 and at most 1"),
    ],
)
def test_a_wrong_machine_is_refused_in_a_sentence(run, refused, schedule, tmp_path, machine, words):
    fits = "workers" not in words
    assert words in refused(run("simulate", schedule, "--machine", written(tmp_path, machine)), 1 if fits else 2)


def test_a_measured_run_knows_how_fast_devices_are(run, schedule, tmp_path):
    slow, trace = written(tmp_path, {**TWO_HOSTS, "speed": [1, 1, 1, 0.5]}), tmp_path / "trace.json"
    assert run("simulate", schedule, "--machine", slow, "--trace", trace).code == 0
    given = [run("simulate", schedule, "--measured", trace, "--machine", slow).out]
    assert [run("simulate", schedule, "--measured", trace, "--machine", written(tmp_path, TWO_HOSTS)).out] == given
