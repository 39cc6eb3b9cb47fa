"""Headers and lines that cannot be: `seal` refuses them in edited JSON, `check` in the file itself, on their line."""

from __future__ import annotations

import json

import pytest
from damage import I, allreduce, free, job, recv, send, step

MERGED = ("scheme", "lowering", "weights", "compute")  # entries of the header of which some keys change
LOOSE = "tensor must be lists of different stages in 0..1, ascending"

# A file, what entries of its header become, and words of the refusal. None: they are left out.
HEADERS = [
    ("1f1b", {"groups": [[0, 1, 2, 3]] * 2}, "groups must be different, but [0, 1, 2, 3] is listed 2 times"),
    ("1f1b", {"edges": [[0, 1], [1, 2]]}, "no stage reads stage 2, and the loss reads the last, 3, alone"),
    ("1f1b", {"scheme": {"layers": 7}}, "layers must be a list of a number for each stage"),
    ("1f1b", {"scheme": {"layers": [1, 0, 1, 1]}}, "layers must be a list of a number for each stage"),
    ("1f1b", {"scheme": {"layers": [1, 1, 1]}}, "layers must be a list of a number for each stage"),
    ("1f1b", {"lowering": {"memory_limit": 0}}, "memory_limit must be a whole number of at"),
    ("1f1b", {"lowering": {"more": 1}}, "and may have memory_limit, updates, accumulated"),
    ("limited", {"lowering": {"memory_limit": 3}}, "holds 4 saved forwards here, and memory_limit is 3 (rule 8: "),
    ("outputs", {"per_consumer": None}, "x.0.0.1 is asked for, but there is no such buffer (rule 2: "),
    ("forwards", {"tied": [[0, 1]]}, "sums no gradients"),
    ("forwards", {"lowering": {"recompute": [0]}}, "redoes nothing"),
    ("forwards", {"weights": {"B": [0, 1]}}, "names all owners"),
    ("forwards", {"compute": {"B": [0, 1]}}, "compute must have F alone"),
    ("buffers", {"lowering": {"accumulated": None}}, "accumulated belongs to updates 2bw"),
    ("stash", {"lowering": {"accumulated": 2}}, "accumulated belongs to updates 2bw"),
    ("buffers", {"lowering": {"accumulated": 0}}, "accumulated must be a whole number of at least 1"),
    ("buffers", {"lowering": {"accumulated": 3}}, "no gradient is left for this step"),
    ("stash", {"tied": [[0, 1]]}, "tied stages step together"),
    ("stash", {"weights": {"F": [0, 0], "B": [0, 0]}, "owners": [[0], [0]]}, "is not on the worker of its weights"),
    ("shards", {"shards": [[0, 1]]}, "shards must be a list of 2 lists of ranks"),
    ("shards", {"shards": [[0, 1], []]}, "shards must name an owner in 0..1 of every shard of every stage"),
    ("shards", {"shards": [[0, 2], [1, 0]]}, "shards must name an owner in 0..1"),
    ("shards", {"shards": [[0], [1]]}, "shards must divide a stage, or be left out"),
    ("shards", {"shards": [[1, 0], [1, 0]]}, "the first owner of each stage must be the worker that weights names"),
    ("shards", {"shards": [[0, 0], [1, 0]]}, "owners do not agree with weights"),
    ("shards", {"shards": [[0, 1, 1], [1, 0]]}, "w.0/2"),
    ("ring", {"parts": [0, 4]}, "parts must be 2 numbers of at least 1"),
    ("ring", {"parts": [4]}, "parts must be 2 numbers"),
    ("ring", {"parts": [2**30, 2**30]}, "parts of gradients"),
    ("ring", {"parts": [2, 4]}, "there is no such shard"),
    ("ring", {"lowering": {"sums": None}}, "parts: only what several owners of a stage sum by messages"),
    ("ring", {"tied": [[0, 1]]}, "lowering: sums of weights that are tied"),
    ("ring", {"lowering": {"sums": 7}}, "lowering: sums must be a printable string"),
    ("sliced", {"tensor": {"degree": 3, "replicated": [1]}}, "degree must be at least 2 and divide the 4 stages"),
    ("sliced", {"tensor": {"degree": 1, "replicated": [1]}}, "degree must be at least 2 and divide the 4 stages"),
    ("sliced", {"tensor": {"degree": 4, "replicated": [0]}}, "edge (0, 0) does not go from a smaller to a"),
    ("sliced", {"tensor": {"degree": 2, "replicated": [0]}}, "which ends in the loss, must be replicated"),
    ("sliced", {"tensor": {"degree": 2, "replicated": [1, 1]}}, LOOSE),
    ("sliced", {"tensor": {"degree": 2, "replicated": []}}, LOOSE),
    ("sliced", {"tensor": {"degree": 2}}, "tensor must have degree and replicated"),
    ("sliced", {"tensor": 2}, "tensor must have degree and replicated"),
    ("sliced", {"tensor": None}, "no stage reads stage "),
    *(
        ("tied", {"tied": ties}, "tied must ")
        for ties in (7, [0, 3], [[0]], [[3, 0]], [[0, 4]], [[0, 3.0]], [[0, 3], [0, 3]], [[1, 2], [0, 3]])
    ),
    ("tied", {"tied": None}, "tied must be a list"),
]  # fmt: skip

# A file, an instruction that is put before all others of rank 0, and words of the refusal.
LINES = [
    ("stash", job("FWD", 0, 0), "a version is missing"),
    ("stash", step(0), "a version is missing"),
    ("stash", job("FWD", 0, 0) | I(version=5), "there is no such rank, group or version"),
    ("stash", job("FWD", 0, 0) | I(version=-1), "FWD is written as one of"),
    ("stash", job("BWD", 0, 0) | I(version="0"), "BWD is written as one of"),
    ("stash", free("w.0"), "a version is missing"),
    ("stash", free("w.0@5"), "there is no such rank, group or version"),
    ("stash", free("w.0@"), "FREE is written as one of"),
    ("stash", free("w.0@00"), "a number has leading zeros"),
    ("stash", free("dw.0@1"), "FREE is written as one of"),
    ("stash", free("x.0.0@0"), "FREE is written as one of"),
    ("stash", send("w.0@0", 1), "SEND is written as one of"),
    ("stash", recv("g.0.0@0", 1), "RECV is written as one of"),
    ("stash", I(op="NORM", group=0, version=0), "NORM is written as one of"),
    ("shards", free("w.0"), "the weights of this stage are divided: name a shard"),
    ("shards", free("w.0/2"), "there is no such shard"),
    ("shards", free("w.0/00"), "a number has leading zeros"),
    ("shards", send("x.0.0/0", 1), "SEND is written as one of"),
    ("shards", step(0), "the weights of this stage are divided: name a shard"),
    ("shards", step(0) | I(shard=7), "there is no such shard"),
    ("fsdp", free("w.0/0"), "have no shards"),
    ("fsdp", step(0) | I(shard=0), "have no shards"),
    ("tied", allreduce("t.1", 1), "there is no such tie"),
    ("tied", allreduce("t.0.0", 1), "ALLREDUCE is written as one of"),
    ("tied", send("t.0", 1), "SEND is written as one of"),
    ("tied", free("t.0"), "FREE is written as one of"),
]


def without_none(entries):
    return {key: value for key, value in entries.items() if value is not None}


@pytest.mark.parametrize(("name", "changes", "words"), HEADERS, ids=[f"{row[0]} {row[1]}"[:60] for row in HEADERS])
def test_a_header_that_cannot_be_is_refused(name, changes, words, bases, run, refused, tmp_path):
    path, file = tmp_path / "edited.json", json.loads(bases[name])
    merged = {key: without_none(file[key] | changes[key]) if key in MERGED else changes[key] for key in changes}
    path.write_text(json.dumps(without_none(file | merged)))
    sealed = run("seal", path)
    assert words in refused(sealed if sealed.code else run("check", path), 1)
    lines, (key, *_) = bases[name].splitlines(keepends=True), merged
    place = next(k for k, line in enumerate(lines) if line.startswith(f' "{key}": '))
    if sealed.code and lines[place].endswith(",\n") and merged[key] is not None:  # it is one line of the file
        lines[place] = f' "{key}": {json.dumps(merged[key])},\n'
        path.write_text("".join(lines))
        message = refused(run("check", path), 1)
        assert words in message and message.startswith(f"schedgen: {path}:"), message
        if words.startswith(key):
            assert message.startswith(f"schedgen: {path}:{place + 1}: ")


@pytest.mark.parametrize(("name", "instruction", "words"), LINES, ids=[f"{row[0]} {row[1]}" for row in LINES])
def test_a_line_that_cannot_be_is_refused(name, instruction, words, bases, run, refused, tmp_path):
    path, file = tmp_path / "edited.json", json.loads(bases[name])
    file["programs"][0].insert(0, instruction)
    path.write_text(json.dumps(file))
    message = refused(run("seal", path), 1)
    assert "rank 0, instruction 0: " in message and words in message
    lines = bases[name].splitlines(keepends=True)
    place = lines.index("  [\n") + 1
    path.write_text("".join([*lines[:place], f"   {json.dumps(instruction)},\n", *lines[place:]]))
    message = refused(run("check", path), 1)
    assert message.startswith(f"schedgen: {path}:{place + 1}: rank 0: ") and words in message
