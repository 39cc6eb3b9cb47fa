"""Fake tensors, which have shapes and types but no data: modules are built and run on them without memory."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode


class _NoMemo(FakeTensorConverter):
    """Keeps no weak references to fake tensors: torch refuses to convert a module (`to`) that has such parameters."""

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


def fake_mode() -> FakeTensorMode:
    """A mode in which modules are built and run without data; real tensors that they refer to become fake."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.fake_tensor_converter = _NoMemo()
    return fake
