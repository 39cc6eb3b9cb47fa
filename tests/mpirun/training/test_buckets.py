"""Batches of several lengths in turn: under any scheme, traced, and resumed under another."""

from __future__ import annotations

from examples import further

from schedgen.checker import checked
from schedgen.report.chrome_trace import read_trace, run_numbers

RUN = """
lengths = (6, 9, 9, 6)  # of four batches
items = [torch.randint(12, (lengths[k // 4],), generator=torch.Generator().manual_seed(k)) for k in range(16)]
items, batches = [(tokens, tokens.flip(0)) for tokens in items], [[*range(k, k + 4)] for k in range(0, 16, 4)]
class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(12, 8), nn.Dropout(0.25)
    def forward(self, tokens):
        return self.drop(self.words(tokens)) + torch.tensor([1.0, tokens.shape[1]]).mean()
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head, self.drop = nn.Linear(8, 8), nn.Linear(8, 12), nn.Dropout(0.25)
    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.mix(x.cumsum(1) / x.shape[1]))))
def loss(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())
def made(scheme, kind="split", **options):
    torch.manual_seed(0)
    parts = [First(), Last()]
    if kind == "split":  # traced once for each length
        parts = mpirun.split(nn.Sequential(*parts), torch.zeros(2, 9, dtype=torch.long), stages=2, buckets=(6, 9))
    else:
        options["example"] = None
    return engine(parts, scheme, loss=loss, optimizer=torch.optim.Adam, lr=1e-2, canonical=True, **options)
def train(run, data, steps):
    losses = []
    while run.steps < steps:
        for batch in data:
            losses.append(run.step(batch).loss)
            if run.steps == steps:
                break
    return losses
def items_of(length):
    return tuple(torch.stack([item[k] for item in items if len(item[0]) == length][:4]) for k in range(2))
"""
SCHEMES = ("'1f1b'", "'fsdp', shards=2", *further("'1f1b', recompute='all'", "'zb-h1'"))


def test_every_scheme_gives_the_bits_of_one_process_and_of_the_others(execute, tmp_path):
    script = f"""{RUN}
def trained(scheme, steps, folders, **options):
    with made(scheme, **options) as run:
        data = run.loader(items, 2, batch_sampler=batches)
        run.resume(folder / folders[0], data)
        losses = [run.evaluate([items_of(6), items_of(9)]).loss, str(run.predict([items_of(6)]))]
        losses += [*train(run, data, steps), run.evaluate(data).loss]
        run.save(folder / folders[-1], data)
        assert "verify" not in options or run.verify()
        return losses, {{name: value.tolist() for name, value in run.state_dict().items()}}
def of(scheme, **options):
    return trained(scheme, 6, [str([scheme, *options])], verify=True, **options)
first, *others = {", ".join(f"of({scheme})" for scheme in SCHEMES)}
assert len(first[0]) == 9 and all(other == first for other in others), (first, others)
for saved, scheme in {(("b", "fsdp"), *further(("a", "1f1b")))}:
    options = {{"shards": 2}} if scheme == "fsdp" else {{}}
    trained(scheme, 3, [saved], **options)
    resumed = trained("1f1b" if scheme == "fsdp" else "zb-h1", 6, [saved, saved + "2"])
    assert resumed[0][2:] == first[0][5:] and resumed[1] == first[1], (resumed, first)
"""
    assert "verify: passed" in execute(2, script, tmp_path).out


def test_modules_take_any_length_and_steps_of_a_block_are_traced_whatever_it_is(execute, compiled, tmp_path):
    """Not the evaluations between them, which have a length that no step has."""
    script = """
with made(sys.argv[2], "modules", verify=True, buckets=(3, 6, 9)) as run:
    data, tests = run.loader(items, 2, batch_sampler=batches), [tuple(part[:, :3] for part in items_of(6))]
    run.evaluate(tests)
    train(run, data, 1)
    with contextlib.suppress(ZeroDivisionError), run.trace(folder / "dropped"):
        raise ZeroDivisionError
    with run.trace(folder / "trace"):
        train(run, data, 5)
        run.evaluate(tests)
    train(run, data, 6)
    assert run.verify() and not (folder / "dropped").exists()
"""
    file, trace = compiled("zb-h1", stages=2, microbatches=2), tmp_path / "trace"
    assert "verify: passed: every bit" in execute(2, RUN + script, tmp_path, file).out
    program = checked(str(file))
    numbers = run_numbers(program, read_trace(trace.read_text(), str(trace), program))
    assert numbers["passes"] == 4 and all(worker["busy"] > 0 for worker in numbers["workers"])
