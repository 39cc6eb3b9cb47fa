"""What a command line is refused with: a golden table, and the files that it names."""

from __future__ import annotations

import json
import shlex

import pytest

FILES = {
    "own.py": "def w(s, b, d): return s, s\ndef n(s, b, d): return 2 * b + d\n",
    "one.py": "def w(s, b, d): return 0 * s, 0 * s\ndef n(s, b, d): return b\n",
    "by-slice.py": "def w(s, b, d, t): return t + 0 * s, t + 0 * s\ndef n(s, b, d): return b\n",
    "by-shard.py": "def w(s, b, d, k, *, workers): return k % workers, (b + k) % workers\ndef n(s, b, d): return b\n",
    # Backwards on another worker, every BWD_I before every BWD_W: none of them is held back.
    "elsewhere.py": "split = True\ndef w(s, b, d): return 2 * ((d > 0) * 2 + (d == 0) * (b % 2),)\n"
    "def n(s, b, d): return b + 9 * d\n",
    "tied.graph": {"stages": 4, "tied": [[0, 3]]},
    "four.graph": {"stages": 4},
    "huge.graph": {"stages": 2**20},
    "wrong.graph": {"stages": 4, "tied": [[1]]},
    "costs.json": {"F": [1, 2, 1, 1], "B": [2, 4, 2, 2]},
}
SIZES = "compile --stages 4 --microbatches 8 -o - "
UPDATES = "--updates stash: w must put a job's weights where it is computed"

# Of compile, behind SIZES.
COMPILE = {
    # The conditions under which each scheme's w is defined [Rahimi 2025, "Formal definitions"].
    "ddp --workers 9": "at least one microbatch: 9 workers do not fit 8 microbatches",
    "fsdp --workers 9": "9 workers do not fit 8 microbatches",
    "gpipe --workers 5": "at least one stage: 5 workers do not fit 4 stages",
    "1f1b --workers 5": "5 workers do not fit 4 stages",
    "hanayo --workers 64": "64 workers do not fit",
    "lpp --workers 6 --groups 4": "6 workers do not divide into 4 groups",
    "fslpp --workers 6 --groups 4": "6 workers do not divide into 4 groups",
    "lpp --workers 10 --groups 2": "groups of 5 workers do not fit 4 stages",
    "lpp --workers 9 --groups 9": "9 groups do not fit 8 microbatches",
    "lpp --workers 4": "needs --workers W and --groups G",
    "fslpp --groups 4": "needs --workers W and --groups G",
    "gpipe --groups 2": "gpipe takes no --groups",
    "interleaved-1f1b --group 1": "each of its groups, the last too, needs 2 microbatches or more",
    "interleaved-1f1b --microbatches 4 --group 3": "each of its groups, the last too, needs 2 microbatches or more",
    # Options
    "": "SCHEME",
    "gpipe --microbatches -1": "'-1' is not",
    "gpipe --workers four": "'four' is not",
    f"gpipe --stages {2**31}": "is not a whole number",
    "gpipe --mode lazy": "lazy",
    "gpipe --n sideways": "sideways",
    "gpipe --speed 2": "--speed",
    **{
        f"gpipe --cost '{cost}'": f"'{cost}'"
        for cost in ("", "1,2", "F=1,B=", "F=1,B=0", "F=1,B=-2", "F=1,B=nan", "F=1,B=inf", "F=1,B=2,B=3")
    },
    # Replicas and updates
    "zb-v --workers 3 --replicas 2": "--replicas 2: 3 workers are no multiple of it",
    "1f1b --microbatches 1 --replicas 2": "--replicas 2: each needs a microbatch, not 1 microbatch for all",
    "1f1b --replicas 2,2,1,1": "1f1b takes one number of --replicas, those of the whole scheme",
    "own.py --replicas 2": "own with --replicas needs --workers, those of all replicas",
    "pipedream-2bw --group 3": "pipedream-2bw needs --group of at least 4, the microbatches in flight, not 3",
    "pipedream-2bw --stages 2 --replicas 2,2 --group 3": "at least 4, the microbatches in flight",
    "pipedream-2bw --stages 2 --replicas 2,1": "equally many replicas of each stage, not 2,1",
    "fsdp --updates stash": UPDATES,
    "fslpp --workers 4 --groups 2 --updates stash": UPDATES,
    "pipedream --graph tied.graph": "--updates stash: tied stages step together, which needs --updates flush",
    # Forwards alone
    "1f1b --forward --recompute all": "--recompute does not go with --forward: there is no backward",
    "1f1b --forward --memory-limit 3 --mode greedy": "--memory-limit does not go with --forward",
    "1f1b --forward --updates stash": "--updates stash does not go with --forward",
    "1f1b --forward --offload all": "--offload does not go with --forward",
    "1f1b --forward --offload-optimizer": "no optimizer steps",
    # Memory
    "1f1b --offload 4": "--offload 4: there is no such stage",
    "1f1b --offload 0.1 --recompute all": "--offload 0.1: --recompute redoes this forward",
    "1f1b --offload 3": "nothing would be on the host while a job runs",
    "pipedream --offload-optimizer": "a weight has several STEPs",
    "elsewhere.py --stages 1 --microbatches 2 --workers 3 --mode greedy --memory-limit 1":
        "--memory-limit 1: a worker holds 2 saved forwards",
    # Shards and slices
    "ddp --workers 4 --shards 2":
        "--shards: w names several owners of the weights of stage 0; each shard needs one owner, as in fsdp",
    "1f1b --updates stash --shards 2":
        "--shards does not go with --updates stash: an owner steps the weights of a stage as a whole",
    "gpipe --shards 2,2": "--shards has 2 numbers, but there are 4 stages",
    "gpipe --shards 0": "argument --shards: '0' is not a whole number of at least 1",
    "gpipe --shards 99999999": "4 workers x 399999996 shards of weights are too many",
    "fsdp --workers 4 --graph tied.graph --shards 2": "--shards does not go with ties: stages that share parameters",
    "by-shard.py --stages 2 --workers 2 --shards 2": "whatever the shard k",
    "by-slice.py --stages 2 --tensor 2 --shards 2": "--shards: w takes the tensor slice t",
    "by-slice.py --stages 2 --shards 2": "--shards: w takes the tensor slice t",
    "one.py --stages 2 --graph four.graph --shards 1,2,1,2":
        "--shards: each stage of the scheme is 2 stages of the model",
    "one.py --stages 2 --graph huge.graph --microbatches 128": "more than",
    # Sums by messages
    "ddp --workers 4 --sums two-level": "--sums two-level needs --machine FILE or --topology HxD",
    "ddp --workers 4 --sums two-level --topology 1x3": "the machine has 3 devices, but there are 4 workers",
    "ddp --workers 4 --sums ring --topology 2x2": "tell compile the hosts for --sums two-level",
    "ddp --workers 4 --topology 2x2": "tell compile the hosts for --sums two-level",
    "1f1b --sums ring": "--sums ring: no stage has several owners",
    "ddp --workers 4 --sums ring --graph tied.graph": "--sums ring does not go with ties",
    "ddp --workers 4 --sums tree --forward": "--sums tree does not go with --forward",
    "fsdp --workers 4 --sums tree --shards 2": "--sums tree does not go with --shards",
    "ddp --workers 4 --sums tree --tensor 2": "--sums tree does not go with --tensor",
    "ddp --workers 4 --sums tree --updates stash": "--sums tree does not go with --updates stash",
}  # fmt: skip

COMMANDS = {
    "": "required",
    "compose": "compose",
    "compile gpipe --microbatches 8 -o -": "--stages",
    "compile gpipe --stages 4 -o -": "--microbatches",
    "compile gpipe -o -": "compile needs --stages and --microbatches",
    "compile gpipe --stages 4 --microbatches 8": "-o",
    "check": "FILE",
    "diff one.json": "B",
    "stats a.json --cost F": "'F'",
    # An unset variable of the shell gives an empty name; the command would go on as if the option were not there.
    "compile 1f1b --stages 2 --microbatches 2 -o ''": "schedgen: --output names no file: it is empty",
    "stats 1f1b.json --profile ''": "schedgen: --profile names no file: it is empty",
    "stats 1f1b.json --measured ''": "schedgen: --measured names no file: it is empty",
    "draw 1f1b.json ''": "schedgen: FILE2 names no file: it is empty",
    "check 1f1b.json ''": "schedgen: FILE names no file: it is empty",
    "seal ''": "schedgen: FILE names no file: it is empty",
    # An option that another one overrides, or that has no effect
    **{
        f"{command} --profile costs.json {option}": f"leave {option.split()[0]} out"
        for command in ("simulate 1f1b.json", "draw 1f1b.json", "search 1f1b --stages 4 --microbatches 4")
        for option in ("--cost F=1,B=2", "--alpha 0", "--beta 1", "--activation 1", "--saved 2")
    },
    "draw 1f1b.json --transfers": "--transfers needs --output",
    "simulate 1f1b.json --graph costs.json": "--graph needs --profile",
    # Refused before their work
    "search 1f1b --stages 2 --microbatches 2 -o none/x.json": "No such file or directory",
    "plan costs.json --workers 2 --microbatches 2 --bandwidth 1 -o none/x.json": "No such file or directory",
    # Machines
    "simulate ddp.json --topology 2x2": "--topology",
    "simulate ddp.json --topology 4": "should be hosts x devices, as in 4x8",
    "simulate ddp.json --bandwidth 10":
        "--bandwidth is that of a --topology: give one, as 1xW for one host, or give --beta",
    "simulate ddp.json --topology 1x2 --bandwidth 10": "the machine has 2 devices, but there are 4 workers",
    "simulate ddp.json --slow 4=2": "--slow 4=2: there are ranks 0 to 3",
    "simulate ddp.json --slow 1=0.5": "should be as 0=1.3",
    "simulate ddp.json --slow 1=2,1=3": "--slow 1=3: rank 1 is given twice",
    "simulate ddp.json --topology 1x4 --bandwidth 10,1":
        "--bandwidth: give one number or, with a --topology of several",
    # Transports
    "check 1f1b.json --transport nccl": "--transport 'nccl' is none of mpi, in-order:{one,rank,pair,edge,",
    "repair 1f1b.json": "repair needs either --transport or --fewest",
    "repair 1f1b.json --fewest --cost F=5,B=1": "--fewest simulates nothing: leave --cost out",
    "export 1f1b.json --to torch --topology 1x4 --bandwidth 1 -o -": "leave --topology out",
    "compile 1f1b-rr --stages 2 --replicas 2,2 --microbatches 8 --interleave -o -": "--interleave takes one number of",
    "repair 1f1b.json --transport mpi": "repair moves messages for a transport that delivers in order",
    # Pictures, comparisons, exports
    "draw 1f1b.json -o a.pdf": "should end in .svg, .png or .html",
    "draw 1f1b.json 1f1b.json --measured 1f1b.json": "--measured belongs to one schedule",
    "draw 1f1b.json --by worker": "invalid choice",
    "compare --stages 4 --microbatches 8": "--workers",
    "compare --stages 4 --microbatches 4 --workers 2 --memory-limit 1": "no scheme fits",
    "export 1f1b.json -o -": "--to",
    # Plans and searches
    "plan costs.json --workers 2 --bandwidth 1e9": "--microbatches",
    "plan costs.json --workers 2 --bandwidth 1e9 --schemes 1f1b,nowhere": "'nowhere' is none of gpipe, 1f1b",
    "plan costs.json --workers 2 --bandwidth 1e9 --partition-only --search 1":
        "--search does nothing beside --partition-only",
    "plan costs.json --workers 2 --bandwidth 1e9 --partition-only -o x.json": "--output does nothing beside",
    "search 1f1b --microbatches 4": "search needs --stages or --graph",
    "search 1f1b --microbatches 4 --graph four.graph --stages 8":
        "search orders the 4 stages of four.graph as they are: leave --st",
    "search 1f1b --stages 4 --microbatches 4 --offload": "--offload needs the link to the memory of the host",
    "search 1f1b --microbatches 4 --graph wrong.graph": "tied 1: a tie is two or more different stages in 0..3",
}  # fmt: skip
TABLE = {f"{SIZES}{options}": words for options, words in COMPILE.items()} | COMMANDS


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    for name, text in (FILES | {f"{name}.json": golden[name] for name in ("1f1b", "ddp")}).items():
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return folder


@pytest.mark.parametrize("line", TABLE)
def test_a_command_line_is_refused_with_one_sentence(line, folder, run, refused, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert TABLE[line] in refused(run(*shlex.split(line)), 2)
    assert sorted(folder.iterdir()) == before
