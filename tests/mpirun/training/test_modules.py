"""What modules may do in their forwards, such as drawing random numbers and asking for values or gradients."""

from __future__ import annotations

import pytest


def test_autocast_casts_a_value_from_another_stage_for_each_of_its_readers(tmp_path, execute):
    """As it does without the cut: one cast for all of them would add their gradients in bfloat16."""
    script = """
class Readers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        return x + sum(layer(x) for layer in self.layers)  # in float32
stages = [Readers(), Readers()]
with engine(stages, autocast="bf16", verify=True, canonical=True) as run:
    run.step((x, x))
    assert run.verify()
"""
    execute(1, script, tmp_path)


def test_what_a_script_draws_is_the_same_on_all_ranks(execute):
    """A stage with dropout, which one rank has, seeds that rank's generator; the script's draws are as without it."""
    script = """
stages = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))]
torch.manual_seed(3)
drawn = []
with engine(stages, "1f1b") as run:
    for _ in range(3):
        drawn.append(torch.randn(8, 4))
        run.step((drawn[-1], drawn[-1]))
        run.evaluate([(drawn[-1], drawn[-1])])
torch.manual_seed(3)
print(all(torch.equal(batch, torch.randn(8, 4)) for batch in drawn))
"""
    execute(2, script, out=["True"] * 2)


def test_stages_may_ask_for_values(execute):
    """Experts whose tokens are chosen, a branch on a number, NumPy, packed sequences: as a plain loop trains them."""
    script = """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
    def forward(self, x):
        scores, y = self.gate(x).softmax(-1), torch.zeros_like(x)
        best = scores.argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = torch.where(best == number)[0]
            y = y.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return y
class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum().item() > 0 else 1) + torch.from_numpy(x.detach().numpy().cumsum(0))
class Packed(nn.GRU):
    def forward(self, x):
        rows = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1).expand(-1, 3, -1), 3 - torch.arange(len(x)) % 3,
                                                 batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(super().forward(rows)[0], batch_first=True)[0].mean(1)
def model():
    torch.manual_seed(0)
    return [nn.Linear(6, 6), Experts(), Scaled(6, 6), Packed(6, 6, batch_first=True)]
x = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1))
plain = nn.Sequential(*model())
optimizer = torch.optim.SGD(plain.parameters(), 0.1)
for batch in x:
    optimizer.zero_grad()
    for piece in batch.chunk(4):
        (mse_loss(plain(piece), piece) / 4).backward()
    optimizer.step()
expected = sum(mse_loss(plain(piece), piece).item() for piece in x[0].chunk(4)) / 4
with engine(model(), "zb-v", stages=4, microbatches=4, optimizer=SGD, lr=0.1) as run:
    for batch in x:
        run.step((batch, batch))
    found = run.evaluate([(x[0], x[0])]).loss
if run.rank == 0:
    print(expected, found)
"""
    expected, found = map(float, execute(2, script).out.split())
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_forward_may_ask_for_gradients(scripts, compiled):
    """Such as forces of an energy, also if it is recomputed; if it enables them itself, in evaluations, too."""
    script = """
class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() or "always" in sys.argv):
            x = x + torch.zeros_like(x, requires_grad=True)
            return -torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]
torch.manual_seed(0)
x, stages = torch.randn(8, 6), [nn.Linear(6, 6), Forces()]
expected = mse_loss(nn.Sequential(*stages)(x), x).item()
with mpirun.Engine(sys.argv[1], stages, loss=mse_loss) as run:
    evaluated = run.evaluate([(x, x)]).loss if "always" in sys.argv else expected
    found = run.step((x, x)).loss
    if run.rank == 0:
        print(expected, evaluated, found)
    run.evaluate([(x, x)])
"""
    options = {"stages": 2, "workers": 2, "microbatches": 2}
    saved, redone = compiled("1f1b", **options), compiled("1f1b", **options, recompute="all")
    runs = scripts(2, [[script, schedule, when] for when in ("always", "in training") for schedule in (saved, redone)])
    for done in runs:
        expected, *found = map(float, done.out.split())
        assert found == pytest.approx([expected] * 2, rel=1e-6)
    assert [done.code for done in runs] == [0, 0, 2, 2], runs
    for done in runs[2:]:
        refused = done.err.splitlines()[-1]
        assert refused.startswith(
            "mpirun: stage 1 fails on the shapes it gets: RuntimeError: element 0 of tensors does not"
        )
