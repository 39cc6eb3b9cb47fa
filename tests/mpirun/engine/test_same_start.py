"""Digests of a stage's values."""

import pytest
import torch
from torch import Tensor, nn

from mpirun.data.values import digest_of
from mpirun.engine.same_start import given_digests, value_digests
from mpirun.model.contract import Model
from mpirun.model.split.split_sequential import split_sequential
from schedgen import Options, Sizes, compile, load

COMPLEX = torch.complex(torch.arange(4.0), torch.arange(4.0))


@pytest.mark.parametrize(
    "tensor",
    [COMPLEX.conj(), COMPLEX.conj().imag, COMPLEX[:1].conj().imag, torch.ones(1, 4)[:, 0], torch.ones(()), COMPLEX[:0]],
)
def test_what_tells_values_apart_is_of_the_values_in_whatever_layout(tensor):
    def digests(buffer: Tensor) -> object:
        module = nn.Identity()
        module.register_buffer("buffer", buffer)
        return value_digests(Model([module], nn.functional.mse_loss), 0, module, owned=False)

    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    assert digests(tensor) == digests(plain) and digest_of([tensor]) == digest_of([plain])
    assert not tensor.numel() or digests(tensor) != digests(tensor + 1)


@pytest.mark.parametrize(("scheme", "stages"), [("1f1b", [0, 1]), ("fsdp", [0, 1]), ("ddp", [])])
def test_all_ranks_digest_the_modules_of_stages_that_not_all_own(scheme, stages):
    sizes = Sizes(stages=2, microbatches=2)
    header = compile(load(scheme, sizes), sizes, Options(prefetch=0)).header

    def digests(*modules, **fields):
        return given_digests(Model(modules, nn.functional.mse_loss, **fields), header, 0)

    one, other = nn.Linear(4, 4), nn.Linear(4, 4)
    cut = split_sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2).model(nn.functional.mse_loss)
    for model in (digests(one, other), given_digests(cut, header, 0)):
        assert [values.stage for values in model] == stages and len({*model.values()}) == len(stages)
    uncounted = nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4, device="meta")
    for module in (*uncounted, nn.Identity(), lambda: one):
        assert not digests(module, module)
    assert not digests(one, other, weights=dict)


def test_a_forward_may_resize_a_buffer_that_has_been_digested():
    buffer = torch.ones(2)
    digest_of([buffer])
    assert buffer.resize_(8).numel() == 8
