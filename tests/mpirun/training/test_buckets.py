"""Runs of a module that split has traced once for each bucket: of any scheme, and resumed under another."""

from __future__ import annotations

from examples import further

RUN = """
lengths = (6, 9, 9, 6)  # of four batches
items = [torch.randint(12, (lengths[k // 4],), generator=torch.Generator().manual_seed(k)) for k in range(16)]
items, batches = [(tokens, tokens.flip(0)) for tokens in items], [[*range(k, k + 4)] for k in range(0, 16, 4)]
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.drop = nn.Embedding(12, 8), nn.Dropout(0.25)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 12)
    def forward(self, tokens):
        x = self.drop(self.words(tokens)) + torch.tensor([1.0, tokens.shape[1]]).mean()
        return self.head(self.drop(torch.tanh(self.mix(x.cumsum(1) / x.shape[1]))))
def loss(scores, target):
    return cross_entropy(scores.flatten(0, 1), target.flatten())
def trained(scheme, steps, folders, **options):
    torch.manual_seed(0)
    cut = mpirun.split(Net(), torch.zeros(2, 9, dtype=torch.long), stages=2, buckets=(6, 9))
    adam = {"optimizer": torch.optim.Adam, "lr": 1e-2, "canonical": True}
    with engine(cut, scheme, loss=loss, **adam, **options) as run:
        data = run.loader(items, 2, batch_sampler=batches)
        run.resume(folder / folders[0], data)
        losses = [run.evaluate([items_of(6), items_of(9)]).loss, str(run.predict([items_of(6)]))]
        while run.steps < steps:
            for batch in data:
                losses.append(run.step(batch).loss)
                if run.steps == steps:
                    break
        losses.append(run.evaluate(data).loss)
        run.save(folder / folders[-1], data)
        assert "verify" not in options or run.verify()
        return losses, {name: value.tolist() for name, value in run.state_dict().items()}
def items_of(length):
    return tuple(torch.stack([item[k] for item in items if len(item[0]) == length][:4]) for k in range(2))
"""
SCHEMES = ("'1f1b'", "'fsdp', shards=2", *further("'1f1b', recompute='all'", "'zb-h1'"))


def test_every_scheme_gives_the_bits_of_one_process_and_of_the_others(execute, tmp_path):
    script = f"""{RUN}
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
