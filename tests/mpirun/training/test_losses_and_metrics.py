"""What losses may do and weigh, and the metrics that they return."""

from __future__ import annotations

import json
import re

import pytest
from examples import further


def test_metrics_may_have_other_names_in_another_step_but_not_within_one(scripts):
    """The last microbatches of the second epoch's end are padding, and have none."""
    script = """
def loss(output, target):
    found = mse_loss(output, target)
    number = run.steps
    if number == 4 and sys.argv[1] == "differ":
        return found, {"of": found} if target.sum() else {}
    names = ("", "a", "ba", "", "c", "c")[number]
    return (found, {name: found * (k + 1) for k, name in enumerate(names)}) if number else found
torch.manual_seed(0)
data, logged = [(row, torch.full((4,), k % 4 // 2.0)) for k, row in enumerate(torch.randn(16, 4))], []
LOGGED = "loss grad_norm lr seconds samples_per_second tokens_per_second peak_bytes".split()
with engine(2, "ddp", microbatches=4, loss=loss, log=lambda _, numbers: logged.append(numbers), example=None) as run:
    loader = run.loader(data[:9] if sys.argv[1] == "padded" else data, microbatch_size=2)
    for step in range(3):
        for batch in loader:
            result = run.step(batch)
            means = {name: round(value / result.loss, 4) for name, value in result.metrics.items()}
            if run.rank == 0:
                assert logged[-1].keys() == {*LOGGED, *result.metrics}
                print(means)
"""
    padded, differ = scripts(2, [[script, how] for how in ("padded", "differ")])
    means = ["{}", "{'a': 1.0}", "{'a': 2.0, 'b': 1.0}", "{}", "{'c': 1.0}"]
    assert (padded.code, padded.out.splitlines()) == (0, [*means, means[-1]]), padded.err
    assert (differ.code, differ.out.splitlines()) == (1, means[:4])
    sentence = "mpirun: the loss returned the metrics ['of'] for a microbatch of step 5, but [] for another\n"
    assert differ.err == sentence


@pytest.mark.parametrize("scheme", ["1f1b", "ddp", "fsdp", *further("zb-h1")])
def test_a_mean_over_labels_is_that_of_the_whole_minibatch(execute, scheme):
    """Microbatches have different numbers of labels; the first has none, and no loss."""
    script = """
scheme, size = sys.argv[1], 4
def layers():
    torch.manual_seed(0)
    return [nn.Embedding(11, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 11)]
draw = torch.Generator().manual_seed(1)
tokens, labels = torch.randint(11, (30, 6), generator=draw), torch.randint(11, (30, 6), generator=draw)
labels[torch.rand(30, 6, generator=draw) < 0.4] = -100
labels[:4] = labels[8:12] = -100
def loss(output, target):
    right = (output.argmax(-1) == target)[target != -100]
    assert len(right)
    return cross_entropy(output.flatten(0, 1), target.flatten()), {"accuracy": right.float().mean()}
def numbers(loss, metrics):
    return [loss, metrics["accuracy"]]
one, (first, *rest) = nn.Sequential(*layers()), layers()
run = engine([first, nn.Sequential(*rest)], scheme, microbatches=4, canonical=True,
             loss=loss, loss_weight=lambda target: (target != -100).sum(), verify=True,
             example=(tokens[4:8], labels[4:8]), optimizer=SGD, lr=0.1)
loader, optimizer = run.loader(TensorDataset(tokens, labels), size), torch.optim.SGD(one.parameters(), 0.1)
for number, batch in enumerate(loader):
    found = run.step(batch)
    part = slice(number * 4 * size, (number + 1) * 4 * size)
    whole, metrics = loss(one(tokens[part]), labels[part])
    optimizer.zero_grad()
    whole.backward()
    norm = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
    optimizer.step()
    ours = [*numbers(found.loss, found.metrics), found.grad_norm]
    torch.testing.assert_close(ours, [*numbers(whole.item(), {"accuracy": metrics["accuracy"].item()}), norm.item()])
found = run.evaluate(loader)
whole, metrics = loss(one(tokens), labels)
torch.testing.assert_close(numbers(found.loss, found.metrics), [whole.item(), metrics["accuracy"].item()])
assert found.samples == 30 and number == 1 and run.verify()
run.close()
"""
    done = execute(2, script, scheme)
    assert len(re.findall("by at most 0$", done.out, re.M)) == 3


SCHEMES = [
    ("ddp", 2, {}), ("fsdp", 2, {}), ("fsdp", 2, {"microbatches": 3, "shards": 1}), ("gpipe", 2, {}),
    ("1f1b", 4, {"replicas": 2, "n": "breadth-first", "microbatches": 4}),
    *further(("fslpp", 4, {"groups": 2, "n": "breadth-first", "microbatches": 4})),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "ranks", "options"), SCHEMES)
def test_a_loss_of_the_minibatch_takes_all_outputs_on_every_schedule(execute, scheme, ranks, options):
    """Its gradients are those of one process, also where ranks have different microbatches, or padding."""
    script = """
def contrast(output, target):
    scores = nn.functional.normalize(output) @ nn.functional.normalize(target).T
    return cross_entropy(2 * scores, torch.arange(len(scores))), {"samples": len(scores)}
scheme, options = sys.argv[1], json.loads(sys.argv[2])
draw = torch.Generator().manual_seed(1)
rows = [(torch.randn(4, generator=draw), torch.randn(4, generator=draw)) for _ in range(17)]
stages, plain = layers(4 if scheme == "fslpp" else 2), nn.Sequential(*layers(4 if scheme == "fslpp" else 2))
optimizer = SGD(plain.parameters(), lr=0.5)
with engine(stages, scheme, loss=contrast, loss_of="minibatch", optimizer=SGD, lr=0.5, verify=True,
            **{"microbatches": 2, **options}) as run:
    loader = run.loader(rows, 3)
    size = 3 * options.get("microbatches", 2)
    for epoch in range(2):
        for number, batch in enumerate(loader):
            inputs, targets = (torch.stack(each) for each in zip(*rows[size * number : size * (number + 1)]))
            expected, _ = contrast(plain(inputs), targets)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            found = run.step(batch)
            assert math.isclose(found.loss, expected.item(), rel_tol=1e-5), (epoch, number, found.loss, expected)
            assert found.metrics == {"samples": len(inputs)}
    found, wanted = run.evaluate(loader), 0.0
    for begin in range(0, 17, size):
        inputs, targets = (torch.stack(each) for each in zip(*rows[begin : begin + size]))
        wanted += contrast(plain(inputs), targets)[0].item() * len(inputs) / 17
    assert math.isclose(found.loss, wanted, rel_tol=1e-5) and found.samples == 17
    assert run.verify()
"""
    execute(ranks, script, scheme, json.dumps(options))
