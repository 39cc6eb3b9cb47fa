"""The batches and loaders that a script gives to an Engine, the order of their keys, and who may change them."""

from __future__ import annotations


def test_canonical_bits_do_not_depend_on_where_a_microbatch_begins_in_memory(tmp_path, execute):
    """Microbatches of 360 bytes: cut from a batch, most of them begin where no separate tensor would."""
    script = """
stages = [torch.nn.Linear(5, 8), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 3))]
loss = lambda output, target: cross_entropy(output.flatten(0, 1), target.flatten())
with engine(stages, "1f1b", loss=loss, microbatches=4, verify=True, canonical=True) as run:
    for number in range(6):
        rng = torch.Generator().manual_seed(number)
        run.step((torch.randn(8, 9, 5, generator=rng), torch.randint(0, 3, (8, 9), generator=rng)))
    assert run.verify()
"""
    execute(2, script, tmp_path)


def test_a_dict_is_passed_in_sorted_order_of_its_keys_and_other_keys_are_refused(execute, tmp_path):
    script = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
    def forward(self, a, b):
        return self.first(a) - 3 * self.second(b)
def swapped(given):
    return dict(reversed(given.items()))
def two(verify=True):
    torch.manual_seed(0)
    return engine([Two(), nn.Linear(6, 6)], "1f1b", verify=verify, canonical=True)
a, b, y = torch.randn(3, 16, 6, generator=torch.Generator().manual_seed(1))
items = [({"b": b[k], "a": a[k]}, y[k]) for k in range(16)]
mixed = [(swapped(x) if k in (2, 3, 4, 5, 14, 15) else x, target) for k, (x, target) in enumerate(items)]
found = []
for data, order in ((items, dict), (mixed, swapped)):
    with two() as run:
        losses = [run.step(batch).loss for batch in run.loader(data, 2)]
        whole = order({"a": a[:4], "b": b[:4]}), y[:4]
        losses += [run.step(whole).loss, run.evaluate([whole]).loss]
        found.append((losses, run.verify()))
scores = []
for order in (dict, swapped):
    with two(verify=False) as run:
        loader = run.loader(items, 2)
        if not run.resume(sys.argv[1], data=loader):
            run.step(next(iter(loader)))
            run.save(sys.argv[1], data=loader)
        scores.append(run.evaluate([(order({"a": a[:4], "b": b[:4]}), y[:4])]).loss)
print(found[0] == found[1], found[1][1], scores[0] == scores[1])
with two(verify=False) as run:  # the first argument is a
    print(run.evaluate([({"a": a, "b": b}, y)]).loss != run.evaluate([({"a": b, "b": a}, y)]).loss)
    run.step(({"b": b, "c": a}, y))
"""
    done = execute(2, script, tmp_path, code=2)
    assert done.out.split()[-4:] == ["True"] * 4, done.out + done.err
    said = [line for line in done.err.splitlines() if "note:" not in line]
    assert said == ["mpirun: the input of a microbatch has ['b'], ['c'], but that of the first had ['a'], ['b']"]


def test_a_loader_of_another_engine_is_taken_where_ranks_read_the_same(execute):
    script = """
with engine(2, "1f1b") as one, engine(2, "1f1b") as alike, engine(2, "ddp") as other:
    print(one.step(next(iter(alike.loader(rows, 2)))).tokens)
    one.step(next(iter(other.loader(rows, 2))))
"""
    others = "mpirun: the loader is another Engine's, whose ranks read other microbatches"
    execute(2, script, code=2, out=["16"] * 2, err=[others])


def test_data_that_is_read_once_is_refused_to_verify_at_once(execute):
    script = """
class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows)
with engine(verify=True, example=(x[:2], x[:2])) as run:
    stream = run.loader(Stream(), 2)
    print(run.step((x[:4], x[:4])).tokens, run.evaluate(stream).samples)
    print(refused(lambda: [run.step(batch) for batch in stream]), run.steps)
"""
    once = "mpirun: verify=True does all steps again, but an IterableDataset is read once: train without it"
    execute(1, script, out=["16 8", "2 1"], err=[once])


def test_ranks_read_the_order_of_a_sampler_and_a_loop_that_is_left_early_is_not_taken_up_again(execute, tmp_path):
    """A restart takes it up. Each sample is read by the rank that needs it."""
    script = """
from torch.utils.data import WeightedRandomSampler
data = [(torch.full((4,), float(k)), torch.full((4,), float(k))) for k in range(24)]
def loss(output, target):
    return mse_loss(output, target), {"mean": target.mean()}
def trained(name, leaves=()):
    with engine(2, "ddp", loss=loss, example=(x[:2], x[:2])) as run:
        loader, seen = run.loader(data, 2, sampler=WeightedRandomSampler([1.0] * 24, 16)), []
        resumed = run.resume(folder / name, data=loader)
        while loader.epoch < 3:
            epoch = loader.epoch
            for batch in loader:
                seen.append((batch.epoch, batch.number, run.step(batch).metrics["mean"]))
                run.save(folder / name, data=loader)
                if (batch.epoch, batch.number) in leaves:
                    break
            if (batch.epoch, batch.number) == (0, 1) and name == "restarted":
                break
        return seen
whole, left = trained("whole"), trained("left", [(0, 1), (1, 0)])
assert len(whole) == 12 and left == whole[:2] + whole[4:5] + whole[8:], left
assert trained("restarted", [(0, 1)]) + trained("restarted") == whole
assert len({mean for *_, mean in whole}) > 6
with engine(2, "ddp") as run:
    try:
        for images, labels in run.loader(data, 2):
            pass
    except TypeError as error:
        print(str(error)[:29])
"""
    done = execute(2, script, tmp_path)
    assert done.out.splitlines()[-2:] == ["a loader gives batches, which"] * 2
