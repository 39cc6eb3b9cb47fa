"""What forwards save goes to the host, or a rank, and comes back: the same bits, no byte more than planned."""

from __future__ import annotations

import pytest
import torch
from examples import further
from golden_cases import SIZES, TRAINED
from torch import Tensor, nn

from mpirun.comm.device import Device
from mpirun.engine.core.offload import HostSlot, SavedTensors
from mpirun.engine.core.stage import LocalStage, SavedForward
from mpirun.engine.job_graphs import check_nothing_offloaded
from mpirun.engine.memory_tracker import MemoryTracker
from mpirun.engine.optimizer import StateOnHost
from mpirun.engine.recipe import NamedParameter, Recipe
from mpirun.model.dataflow import TensorSpec
from mpirun.model.stage_shape import StageShape
from schedgen.ir.instructions import Instruction, Kind, Op
from schedgen.util.errors import UsageError

FLOAT = 4  # bytes


class Block(nn.Module):
    """Saves its input, weights, views of one result, one tensor twice, running statistics and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 9), nn.Linear(3, 6), nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.linspace(0.5, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.first(x).chunk(3, dim=1)
        d = self.norm(a * b * self.scale) * c
        return self.second(torch.dropout(torch.sin(d) * torch.cos(d), 0.5, train=True))


@pytest.fixture
def stage():
    torch.manual_seed(0)
    return LocalStage(Block(), 0, StageShape((TensorSpec((5, 6), torch.float32),), ()), Device(), owned_shards=(-1,))


def forward(stage, x, offloads):
    torch.manual_seed(1)
    tensors = SavedTensors(Device(), stage.module, [x], [])
    if not offloads:
        return stage.forward([x], None, save=True), tensors
    with tensors.hooks():
        return stage.forward([x], None, save=True), tensors


def whole(stage, saved, gradient):
    stage.backward(saved, [gradient])


def halves(stage, saved, gradient):
    stage.backward_weight(stage.backward_input(saved, [gradient]))


@pytest.mark.parametrize("backward", [whole, halves])
@pytest.mark.parametrize("compiles", [False, *further(True)], ids=["eager", *further("compiled")])
def test_a_backward_from_what_came_back_gives_the_same_bits(stage, backward, compiles):
    if compiles:
        stage.module.compile(backend="aot_eager")
    x, gradient, results = torch.randn(5, 6), torch.randn(5, 6), []
    for to in ("nowhere", "host", "rank"):
        for parameter in stage.parameters:
            parameter.grad = None
        ((output,), saved), tensors = forward(stage, x, to != "nowhere")
        if to == "rank":
            sizes = [each.size for each in tensors.storages.values()]
            with pytest.raises(RuntimeError, match="stage 0 saves other sizes than when it was tried"):
                tensors.lend(sizes[1:], 0)
            sent = [part.clone() for part in tensors.lend(sizes, 0)]
            tensors.free()
            tensors.take_back(sent)
        if to == "host":
            tensors.offload(slot := HostSlot())
            tensors.free()
            assert slot.memory is not None and len(slot.memory) == sum(each.size for each in tensors.storages.values())
            tensors.reload()
            slot.memory.fill_(255)  # only a copy of it is used from now on
        backward(stage, saved, gradient)
        results.append([output, saved.inputs[0].grad, *(parameter.grad for parameter in stage.parameters)])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))


def test_each_storage_is_copied_once_and_what_the_rank_holds_anyway_is_not(stage):
    """In rows of 5: the 9 of `first`, the 3 of a * b, of what the norm reads, and of each result on to `second`."""
    x = torch.randn(5, 6)
    (_, saved), tensors = forward(stage, x, offloads=True)
    held = {each.data_ptr() for each in (x, stage.weights, *stage.module.buffers())}
    assert held <= tensors.stays and not held & {*tensors.storages}
    sizes = [storage.size for storage in tensors.storages.values()]
    assert 5 * 9 * FLOAT in sizes and sizes.count(5 * 9 * FLOAT) == 1  # of three views
    assert isinstance(saved, SavedForward)


def test_the_device_holds_nothing_of_it_while_it_is_on_the_host(stage):
    x, gradient, slot = torch.randn(5, 6), torch.randn(5, 6), HostSlot()
    with MemoryTracker() as memory:
        for _ in range(2):
            before = memory.live
            (outputs, saved), tensors = forward(stage, x, offloads=True)
            del outputs
            kept, moved = memory.live - before, sum(storage.size for storage in tensors.storages.values())
            assert kept == moved > 0
            tensors.offload(slot)
            assert memory.live - before == kept
            tensors.free()
            assert memory.live == before
            tensors.reload()
            del tensors
            assert memory.live - before == kept
            stage.backward(saved, [gradient])
            del saved
            for parameter in stage.parameters:
                parameter.grad = None
            assert memory.live == before


def test_a_saved_tensor_that_is_changed_later_is_refused(stage):
    tensors = SavedTensors(Device(), stage.module, [], [])
    with tensors.hooks():
        y = torch.sin(torch.cos(stage.parameters[0]))  # the backward of sin needs cos(w) as it was
        y.grad_fn._saved_self.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place later"):
        tensors.offload(HostSlot())


# One of each way to split backwards, to send weights, to slice, to have versions of them. On the CPU, or on a device
# whose kernels run late: there a value that is read too early is NaN.
CASES = {
    "1f1b": ({"offload": "0,1.1,1.3", "prefetch": 0}, "direct"),
    "zb-v": ({"offload": "all"}, "direct"),
    "fsdp-sharded": ({"offload": "all", "prefetch": 0, "offload_optimizer": True}, "direct"),
    "1f1b-tensor": ({"offload": "all", "offload_optimizer": True}, None),
    "pipedream": ({"offload": "all"}, None),
    "1f1b evicts": ({"evict": True}, "direct"),
    "1f1b evicts, by the host": ({"evict": True}, "staged"),
    "pipedream evicts": ({"evict": True}, None),
}


@pytest.fixture(scope="module")
def trained(inside, compiled, text):
    """Two steps by each schedule."""
    results = {}
    for name, (options, how) in CASES.items():
        workers, of = 2 if name == "zb-v" else 4, name.split()[0]
        scheme = of.removesuffix("-tensor").removesuffix("-sharded")
        file = compiled(scheme, workers=workers, microbatches=8, **SIZES[of], **options)
        assert '"buf": "saved.' in file.read_text()
        arguments = [file, "--model", TRAINED[of], "--text", text, "--steps", 2, "--canonical", "--verify"]
        (results[name],) = inside(workers, [{"arguments": arguments, "late": how}])
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_offloads_is_verified_to_the_bit(trained, name):
    assert trained[name].code == 0, trained[name].out
    assert trained[name].differences == {"losses": 0, "gradients": 0, "parameters": 0}


def test_the_state_of_an_optimizer_lives_on_the_host():
    parameter = nn.Parameter(torch.ones(3))
    made = Recipe(lambda named: torch.optim.Adam([named[0].parameter], lr=0.1)).make(
        [NamedParameter("w", parameter, parameter.shape, True)], 0
    )
    plain = torch.optim.Adam([copy := nn.Parameter(torch.ones(3))], lr=0.1)
    state = StateOnHost(Device(), made.optimizers)
    with MemoryTracker() as memory:
        for step in range(3):
            parameter.grad = copy.grad = torch.full((3,), 1.0 + step)
            before = memory.live
            state.reload()
            assert memory.live - before == (2 * 3 * FLOAT if step else 0)
            state.wait()
            made.step(step)
            state.offload()
            state.free()
            assert step == 0 or memory.live == before
            plain.step()
    assert torch.equal(parameter, copy)
    kept = made.optimizers[0].state[parameter]
    assert all(torch.equal(kept[name], value) for name, value in plain.state[copy].items())


def test_graphs_and_offload_refuse_each_other():
    with pytest.raises(UsageError, match="fixed addresses: compile without --offload"):
        check_nothing_offloaded([Instruction(Op.OFFLOAD, Kind.SAVED, 0, 0, -1, -1)])
