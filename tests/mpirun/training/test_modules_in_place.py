"""A run trains the modules that it is given, however their forwards reach the parameters: as plain torch does."""

from __future__ import annotations

import pytest
from examples import further

TRAINED = """
import functools, sys, torch, mpirun
from torch.nn.functional import cross_entropy, linear
STEPS = 6
tokens, target = (torch.randint(13, (16, 5), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
def loss(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten())
class Net(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.emb, self.mix = nn.Embedding(13, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.temperature, self.masks, held = 1.0, [], (self.emb.weight,)
        self.head = {
            "attribute": lambda t: t @ self.emb.weight.t(),
            "partial": functools.partial(linear, weight=self.emb.weight),  # which only split follows
            "tuple": lambda t: t @ held[0].t(),
            "cache": lambda t: self.mask() * t @ self.emb.weight.t(),
        }.get(how)
        self.kept = [self.emb]
    def mask(self):
        if not self.masks:
            self.masks.append(torch.arange(8) / 8)
        return self.masks[0]
    def forward(self, x):
        x = self.mix(self.emb(x)) / self.temperature
        return self.head(x) if self.head else x @ self.kept[0].weight.t()
class Head(nn.Module):
    def __init__(self, emb):
        super().__init__()
        self.emb = emb
    def forward(self, x):
        return x @ self.emb.weight.t()
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mix = nn.Embedding(13, 8), nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.mix(self.emb(x)))
def modules(how):
    torch.manual_seed(0)
    if how == "storage":
        body, head = Body(), nn.Linear(8, 13, bias=False)
        head.weight.data = body.emb.weight.data
        return [body, head]
    if how == "submodule":
        body = Body()
        return [body, Head(body.emb)]
    return [Net(how), nn.Identity()]
def plainly(how, anneal, steps=STEPS):
    net = nn.Sequential(*modules(how))
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    for step in range(steps):
        anneal(net[0], step)
        optimizer.zero_grad()
        value = loss(net(tokens), target)
        value.backward()
        optimizer.step()
        yield value.item()
def engine(scheme, model, **options):
    return mpirun.Engine(scheme, model, stages=2, microbatches=4, loss=loss, optimizer=torch.optim.SGD, lr=0.5,
                         canonical=True, timeout=60, **options)
def close(found, expected):
    torch.testing.assert_close(torch.tensor(found), torch.tensor(list(expected)))
def fixed(net, step):
    pass
"""

CASES = """
def annealed(net, step):
    net.temperature = 1.0 + step
    net.mix[1].train(step % 2 == 0)
how, schemes, is_split = sys.argv[1], sys.argv[2].split(","), sys.argv[3] == "split"
for scheme in schemes:
    given = modules(how)
    anneal = annealed if how == "attribute" and not is_split else fixed
    model = mpirun.split(nn.Sequential(*given), tokens[:4], stages=2) if is_split else given
    with engine(scheme, model, verify=anneal is fixed) as run:
        losses = []
        for step in range(1 if scheme == "pipedream" else STEPS):
            anneal(given[0], step)
            losses.append(run.step((tokens, target)).loss)
        if scheme != "pipedream":  # its updates are delayed
            close(losses, plainly(how, anneal))
        assert anneal is not fixed or run.verify()
        for name, value in run.state_dict().items() if scheme == "ddp" and not is_split else ():
            stage, _, own = name.partition(".")
            assert torch.equal(given[int(stage[5:])].get_parameter(own), value)
"""


def test_parameters_are_reached_as_plain_torch_reaches_them(scripts):
    """By lambdas and lists; tied by storage, or by a submodule of two stages, on one rank or two.

    A list may also cache what a forward makes.
    """
    every = "ddp,1f1b,zb-h1,fsdp"
    cases = [("list", every, "modules"), ("submodule", "1f1b,ddp", "modules"), ("cache", "1f1b", "modules")]
    cases += [("list", "pipedream", "modules"), ("partial", "1f1b", "split"), ("storage", "ddp", "split")]
    cases += further(*((how, every, "modules") for how in ("attribute", "storage", "submodule", "cache")))
    for done in scripts(2, [[TRAINED + CASES, *case] for case in cases]):
        assert done.code == 0, done.err


TWICE = """
mix = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
with mpirun.Engine("fsdp", [nn.Embedding(13, 8), mix, mix, nn.Linear(8, 13)], stages=4, microbatches=4, loss=loss,
                   canonical=True, verify=True, timeout=60) as run:
    run.step((tokens, target))
    assert run.verify()
"""


def test_a_module_of_two_stages_draws_for_the_one_that_runs(scripts):
    (done,) = scripts(2, [[TRAINED + TWICE]])
    assert done.code == 0, done.err


REFUSED = {
    "another stage's": (
        "first = modules('list')[0]; second = nn.Identity(); second.forward = lambda x: x * first.emb.weight.sum()",
        "1f1b",
        "stage 1 reads a trained parameter of shape (13, 8) by a reference",
    ),
    "its own": (
        "first, second = modules('tuple')",
        "1f1b",
        "stage 0 reads a trained parameter of shape (13, 8) by a reference",
    ),
    "of a tie": (
        "first, second = modules('submodule'); w = second.emb.weight; second.forward = lambda x: x @ w.t()",
        "ddp",
        "stage 1 reads a trained parameter of shape (13, 8) by a reference",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_a_step_would_miss_are_refused_by_name(case, scripts):
    make, scheme, why = REFUSED[case]
    script = f"\n{make}\nwith engine('{scheme}', [first, second]) as run:\n    run.step((tokens, target))"
    (done,) = scripts(2, [[TRAINED + script]])
    assert done.code == 2 and why in done.err, done.err


def test_what_a_script_writes_to_its_parameters_between_steps_counts_in_all_stages(execute):
    """Also of one that two stages of a rank have, or that a rank fetches."""
    script = """
@torch.no_grad()
def written(body, step):
    for x in body.parameters():
        x.detach().mul_(0.9)
        x.copy_(x * 0.9)
        x.data = x * 0.9
    body.load_state_dict({name: x * 0.9 for name, x in body.state_dict().items()})
for scheme in ("ddp", "fsdp"):
    given, losses = modules("submodule"), []
    with engine(scheme, given) as run:
        for step in range(STEPS):
            written(given[0], step)
            losses.append(run.step((tokens, target)).loss)
        assert given[0].emb.weight is given[1].emb.weight
        written(given[0], STEPS)
        losses.append(run.evaluate([(tokens, target)]).loss)
    close(losses, plainly("submodule", written, STEPS + 1))
"""
    execute(2, TRAINED + script)


GAN = """
from torch.nn.functional import binary_cross_entropy_with_logits as judge
adam = functools.partial(torch.optim.Adam, lr=0.01)
real, fake = torch.ones(8, 1), torch.zeros(8, 1)
def parts():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    return generator, nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2)), nn.Linear(8, 1)
def drawn(step):
    return torch.randn(3, 8, 3, generator=torch.Generator().manual_seed(step))
def plainly():
    g, *ds = parts()
    d = nn.Sequential(*ds)
    of_g, of_d = adam(g.parameters()), adam(d.parameters())
    for step in range(5):
        noise, other, points = drawn(step)
        for optimizer, data, target in (
            (of_d, lambda: torch.cat([points[:, :2], g(noise).detach()]), torch.cat([real, fake])),
            (of_g, lambda: g(other), real),
        ):
            loss = judge(d(data()), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()
(g, first, last), losses = parts(), []
options = dict(stages=2, microbatches=2, loss=judge, optimizer=adam, timeout=60)
d_alone = mpirun.Engine(sys.argv[1], [first, last], **options)
with d_alone as run_d, mpirun.Engine(sys.argv[1], [nn.Sequential(g, first), last], **options) as run_g:
    for step in range(5):
        noise, other, points = drawn(step)
        with torch.no_grad():
            points = torch.cat([points[:, :2], run_d.comm.bcast(g(noise))])  # rank 0 owns the generator
        nn.Sequential(first, last).requires_grad_(True)
        losses.append(run_d.step((points, torch.cat([real, fake]))).loss)
        nn.Sequential(first, last).requires_grad_(False)
        losses.append(run_g.step((other, real)).loss)
torch.testing.assert_close(torch.tensor(losses), torch.tensor(list(plainly())))
"""


@pytest.mark.parametrize("scheme", ["ddp", "1f1b"])
def test_two_engines_train_a_generator_and_a_discriminator_as_two_optimizers_do(scheme, execute):
    execute(2, TRAINED + GAN, scheme)


def test_an_engine_may_read_on_one_rank_what_another_trains_on_all(execute):
    """Its own optimizer leaves that out, so that no rank has old values."""
    script = """
first, last = layers(2)
plain = nn.Sequential(*layers(2))
steps_of_last = SGD(plain[1].parameters(), lr=0.1)
options = {"optimizer": lambda named: [], "example": (x[:4], x[:4])}
with engine([first, last], "1f1b", **options) as reads, engine(last, "ddp", optimizer=SGD, lr=0.1) as trains:
    for _ in range(3):
        torch.testing.assert_close(reads.step((x, x)).loss, mse_loss(plain(x), x).item())
        steps_of_last.zero_grad()
        mse_loss(plain[1](x), x).backward()
        steps_of_last.step()
        trains.step((x, x))
"""
    execute(2, script)


def test_an_engine_whose_ranks_own_other_stages_than_the_one_before_resumes(scripts, tmp_path):
    script = """
net = [*modules("list"), nn.Identity(), nn.Linear(13, 13)]
options = dict(stages=4, microbatches=4, loss=loss, optimizer=torch.optim.SGD, lr=0.5, timeout=60,
               example=(tokens[: len(tokens) // 4], target[: len(tokens) // 4]))
with mpirun.Engine("1f1b", net, **options) as run:
    run.step((tokens, target))
    run.save(sys.argv[1])
with mpirun.Engine("zb-v", net, **options) as run:
    assert run.resume(sys.argv[1])
    run.step((tokens, target))
"""
    (done,) = scripts(2, [[TRAINED + script, tmp_path / "saved"]])
    assert done.code == 0, done.err


@pytest.mark.parametrize("scheme, model", [("1f1b", "split"), ("fsdp", "modules"), ("ddp", "split")])
def test_a_state_dict_of_the_whole_model_is_loaded_from_rank_0(execute, compiled, scheme, model):
    """Under names of the module or of `state_dict`, between steps, too; the optimizer keeps what it has."""
    script = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(3))
    def forward(self, x):
        return self.second(self.norm(self.first(x)))
def made(seed):
    torch.manual_seed(seed)
    if sys.argv[2] == "split":
        net = Tied()
        return net, mpirun.split(net, x[:4], stages=2)
    return None, [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 4)]
(net, model), (_, other) = made(0), made(1)
options = {"scheme": sys.argv[1], "optimizer": SGD, "lr": 0.1, "example": (x[:4], x[:4])}
with engine(model, **options) as run, engine(other, **options) as into:
    whole = {name: value.clone() for name, value in net.state_dict().items()} if net else run.state_dict()
    into.load_state_dict(whole if rank == 0 else None)
    for _ in range(2):
        print(run.step((x, x)).loss == into.step((x, x)).loss, end=" ")
        whole = run.state_dict()
        into.step((x + 1, x))
        into.load_state_dict(whole)
        same = into.state_dict()
        print(same.keys() == whole.keys() and all(same[name].equal(whole[name]) for name in whole))
"""
    file = compiled(scheme, stages=2, microbatches=2, workers=2, shards=2) if scheme == "fsdp" else scheme
    execute(2, script, file, model, out=["True True"] * 4)
