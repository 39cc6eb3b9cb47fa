"""Digests of a stage's values."""

import pytest
import torch
from torch import Tensor, nn

from mpirun.data.values import digest_of
from mpirun.engine.build import value_digests
from mpirun.model.contract import Model

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


def test_a_forward_may_resize_a_buffer_that_has_been_digested():
    buffer = torch.ones(2)
    digest_of([buffer])
    assert buffer.resize_(8).numel() == 8
