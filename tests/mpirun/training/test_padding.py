"""The last step of an epoch is padded: padding changes nothing, and is refused where it cannot be taken off."""

from __future__ import annotations

import json


def test_a_microbatch_of_padding_alone_changes_nothing_whatever_the_model_returns(execute):
    """Masked logits, whose sums are not finite, and complex numbers."""
    script = """
class Masked(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).masked_fill(torch.arange(4) == 3, self.low)
class Complex(torch.nn.Linear):
    def forward(self, x):
        return torch.view_as_complex(super().forward(x).view(len(x), 2, 2))
def size(output, target):
    return output.abs().mean()
torch.manual_seed(0)
x, y = torch.randn(6, 4), torch.arange(6) % 3
kinds = (Masked, -math.inf, cross_entropy), (Masked, torch.finfo().min, cross_entropy), (Complex, 0, size)
for kind, low, loss in kinds:
    net = kind(4, 4)
    net.low = low
    run = engine([copy.deepcopy(net)], loss=loss, verify=True, canonical=True, optimizer=SGD, lr=0.1)
    losses = [run.step(batch).losses for batch in run.loader(list(zip(x, y)), 2)]
    plain = torch.optim.SGD(net.parameters(), 0.1)
    for parts in ((x[:2], y[:2]), (x[2:4], y[2:4])), ((x[4:], y[4:]),):
        plain.zero_grad()
        for data, target in parts:
            (loss(net(data), target) / len(parts)).backward()
        plain.step()
    trained = run.session.interpreter.stages[0].module.parameters()
    print(losses[1][1], run.verify(), all(map(torch.equal, trained, net.parameters())))
    run.close()
"""
    done = execute(1, script)
    assert [line for line in done.out.splitlines() if not line.startswith("verify: ")] == ["0.0 True True"] * 3


def test_padding_that_cannot_be_taken_off_is_refused(execute):
    """Outputs and targets that are flattened; before anything is trained, if the number of samples is known."""
    script = """
class Flat(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).flatten(0, 1)
class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()
class Pairs(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x).flatten(1)
        return y @ y.T
class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)
def loss(output, target):
    rows = output.shape[-1:] == (4,)
    return cross_entropy(output.view(-1, 4), target.flatten()) if rows else output.mean()
def flat(items):
    return torch.stack([x for x, _ in items]), torch.cat([y for _, y in items])
def train(run, loader):
    return [run.step(batch).loss for batch in loader]
data = list(zip(torch.randn(5, 3, 4), torch.arange(15).view(5, 3) % 4))
whole = data[:4] + data[:2]
evaluate, predict, found = mpirun.Engine.evaluate, mpirun.Engine.predict, {}
for name, do, kind, samples, collate in [
    ("output", train, Flat, data, None), ("target", train, torch.nn.Linear, data, flat),
    ("evaluated", evaluate, Flat, data, None), ("predicted", predict, Flat, data, None),
    ("a loss of padding", train, Mean, data, None),
    ("pairs", train, Pairs, data, None), ("pairs in a stream", train, Pairs, Stream(), None),
    ("no pairs padded", lambda *given: train(*given) and evaluate(*given).samples, Pairs, whole, None),
    ("target not used", lambda *given: len(predict(*given)), torch.nn.Linear, data, flat),
    ("none padded in part", lambda *given: train(*given) and len(predict(*given)), Flat, whole, flat),
    ("not so far", lambda *given: evaluate(*given, batches=1).samples, Flat, data, None),
]:
    err = io.StringIO()
    run = engine([kind(4, 4)], loss=loss)
    with contextlib.redirect_stderr(err), run:
        try:
            result = do(run, run.loader(samples, 2, collate=collate))
        except SystemExit as end:
            result = [line for line in err.getvalue().splitlines() if "note:" not in line]
        found[name] = run.steps, result
print(json.dumps(found))
"""
    done = execute(1, script)
    has = "mpirun: the {} of a microbatch of 2 samples has shape {}, but the last step of an epoch is padded: "
    give = (
        "give tensors with the samples in dimension 0 alone (expand over them what is not by sample; compute means "
        "over samples in loss=), or the loader another microbatch_size, such as one that divides the samples, or "
        'last="drop"'
    )
    shapes = ("output", "(6, 4)"), ("target", "(6,)"), ("output", "()"), ("output", "(2, 2)")
    output, target, number, pairs = ([has.format(*shape) + give] for shape in shapes)
    assert json.loads(done.out) == {
        "output": [0, output], "target": [0, target], "evaluated": [0, output],
        "predicted": [0, output], "a loss of padding": [0, number],
        "target not used": [0, 5], "none padded in part": [2, 18], "not so far": [0, 4], "pairs": [0, pairs],
        "pairs in a stream": [1, pairs], "no pairs padded": [2, 6],
    }  # fmt: skip


def test_padding_is_refused_where_each_microbatch_counts_alike(execute):
    script = """
data = [(x, x) for x in torch.randn(13, 4)]
with engine([nn.Linear(4, 4)], "pipedream", stages=1, example=None) as run:
    for batch in run.loader(data, 3):
        run.step(batch)
"""
    done = execute(1, script, code=2)
    assert "this schedule updates stages one by one, so no microbatch may be padded" in done.err
