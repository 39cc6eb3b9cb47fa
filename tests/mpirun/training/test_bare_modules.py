"""A module as it is, under ddp and fsdp: its own input, output and names, and microbatches of any shapes."""

from __future__ import annotations

import pytest

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.norm, self.head.weight = nn.LayerNorm(8), self.words.weight

    def forward(self, tokens, *, scale=1.0, labels=None, **rest):
        assert self.training or not torch.is_grad_enabled()
        tokens = tokens["ids"] if isinstance(tokens, dict) else tokens
        self.seen = tuple(tokens.shape), sorted(rest)
        hidden = self.norm(self.words(tokens).tanh())
        scores = scale * self.head(hidden)
        loss = None if labels is None else cross_entropy(scores.flatten(0, 1), labels.flatten())
        return {"loss": loss, "scores": scores, "hidden": (hidden, "a word")}

def net():
    torch.manual_seed(0)
    return Net()

draw = torch.Generator().manual_seed(1)
def tokens(*shape):
    return torch.randint(11, shape, generator=draw)
"""


@pytest.mark.parametrize("scheme", ["ddp", "fsdp"])
def test_a_bare_module_is_trained_as_in_a_plain_loop(execute, scheme):
    """Batches have other lengths, and other numbers of samples, one of them fewer than microbatches."""
    script = """
def loss(output, target):
    assert output["hidden"][1] == "a word" and output["loss"] is None
    return cross_entropy(output["scores"].flatten(0, 1), target.flatten()), {"size": output["hidden"][0].shape[1]}
plain, module = net(), net()
optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
batches = [(tokens(*shape), tokens(*shape)) for shape in ((8, 5), (7, 9), (3, 2), (8, 5))]
run = engine(module, sys.argv[1], microbatches=4, loss=loss, optimizer=torch.optim.Adam, lr=1e-2, verify=True)
for ids, target in batches:
    expected = cross_entropy(plain(ids)["scores"].flatten(0, 1), target.flatten())
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    found = run.step((ids, target))
    assert math.isclose(found.loss, expected.item(), rel_tol=1e-4), (found.loss, expected)
    assert found.metrics == {"size": ids.shape[1]} and found.tokens == target.numel()
with torch.no_grad():
    expected = [plain(ids)["scores"] for ids, _ in batches[1:3]]
    mean = sum(cross_entropy(y.flatten(0, 1), t.flatten()) * len(t) for y, (_, t) in zip(expected, batches[1:3])) / 10
assert math.isclose(run.evaluate(batches[1:3]).loss, mean, rel_tol=1e-5)
outputs = run.predict(batches[1:2])
weights = run.state_dict()
if run.rank == 0:
    torch.testing.assert_close(outputs["scores"], expected[0], rtol=1e-4, atol=1e-5)
    assert outputs["hidden"][1] == "a word" and weights.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)
assert run.verify()
run.close()
"""
    execute(2, NET + script, scheme)


def test_of_a_mapping_forward_gets_what_it_takes_and_the_loss_gets_all(execute):
    """The model's own loss is that of the samples alone: a microbatch that samples fill in part is not padded."""
    script = """
class Strict(Net):
    def forward(self, tokens, labels):
        return super().forward(tokens, labels=labels)
rows = [{"tokens": tokens(4), "labels": tokens(4), "weights": torch.tensor(1.0 + k)} for k in range(5)]
for kind, rest in ((Net, ["weights"]), (Strict, [])):
    torch.manual_seed(0)
    module = kind()
    with engine(module, "ddp", microbatches=4, loss=lambda output, row: (output["loss"], {"w": row["weights"].mean()}),
                lr=0.0) as run:
        whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        expected = kind()
        expected.load_state_dict(module.state_dict())
        expected = expected(whole["tokens"], labels=whole["labels"])["loss"].item()
        loader = run.loader(rows, 2)
        for batch in loader:
            found = run.step(batch)
            assert batch.samples == [2, 2, 1, 0] and math.isclose(found.loss, expected, rel_tol=1e-5)
            assert found.metrics == {"w": 3.0} and found.tokens == 5 * 4
        assert module.seen == (((1, 4), (2, 4))[run.rank], rest)
        assert math.isclose(run.evaluate(loader).loss, expected, rel_tol=1e-5)
        assert math.isclose(run.evaluate([whole]).loss, expected, rel_tol=1e-5)
        assert math.isclose(run.step(whole).loss, expected, rel_tol=1e-5)
"""
    execute(2, NET + script)


def test_inputs_are_passed_as_they_are(execute):
    """A dict that forward takes as one argument, args with kwargs, no target, the children of a Sequential."""
    script = """
def loss(output, target):
    return (output["scores"] ** 2).mean()
ids = tokens(8, 5)
losses = []
for batch in (ids, ({"ids": ids}, None), (((ids,), {"scale": 1.0}), None), ((ids,), None)):
    with engine(net(), "ddp", loss=loss) as run:
        losses.append(run.step(batch).loss)
assert len(set(losses)) == 1, losses
pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
with engine(pair, "ddp") as run:
    run.step((x, x))
    weights = run.state_dict()
assert rank or weights.keys() == pair.state_dict().keys()
"""
    execute(2, NET + script)


def test_a_bare_module_on_the_meta_device_gets_its_values(execute, tmp_path):
    script = """
with torch.device("meta"):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
with engine(module, "fsdp", loss=lambda y, t: y.square().mean()) as run:
    assert run.step((x, x)).loss > 0
    run.export(folder / "out")
with torch.device("meta"):
    again = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
with engine(again, "ddp", weights=folder / "out", loss=lambda y, t: y.square().mean()) as other:
    other.step((x, x))
"""
    execute(2, script, tmp_path)
