"""Messages: matched, non-blocking, straight from and into tensors' memory.

Every kind of buffer has one tag, and MPI keeps messages of one tag between
two ranks in order, which is all that a schedule needs. Tensors travel as
bytes of their element size, so MPI never has to know a type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

# Integers of an element's size, so that a count stays small and bf16 travels too.
_TYPES = {1: MPI.BYTE, 2: MPI.INT16_T, 4: MPI.INT32_T, 8: MPI.INT64_T, 16: MPI.C_DOUBLE_COMPLEX}


def view(tensor: Tensor) -> list[Any]:
    """An MPI buffer over a contiguous tensor's memory. It does not keep the tensor alive: the caller does."""
    assert tensor.is_contiguous()
    size = tensor.numel() * tensor.element_size()
    return [MPI.buffer.fromaddress(tensor.data_ptr(), size), tensor.numel(), _TYPES[tensor.element_size()]]


class Transport:
    def __init__(self, comm: MPI.Intracomm, groups: Sequence[Sequence[int]]) -> None:
        self.comm = comm.Dup()
        world = comm.Get_group()
        self.groups = [
            comm.Create_group(world.Incl(list(members)), tag) if comm.rank in members else None
            for tag, members in enumerate(groups)
        ]

    def group(self, index: int) -> MPI.Intracomm:
        """The communicator of one of the schedule's groups, which this rank is in."""
        comm = self.groups[index]
        assert comm is not None
        return comm

    def send(self, tensor: Tensor, peer: int, kind: int) -> MPI.Request:
        return self.comm.Isend(view(tensor), peer, kind)

    def receive(self, tensor: Tensor, peer: int, kind: int) -> MPI.Request:
        return self.comm.Irecv(view(tensor), peer, kind)


class Sum:
    """The sum of rows that lie on the members of a group, started now and finished later.

    Each member gets one slice of every row of every member, adds them up in
    torch and in the order of the rows' keys, and the slices are put together
    again: the traffic of a reduce-scatter and a gather, for any type, with the
    same bits on all members. Plain messages carry it: MPI's own sum knows no
    bf16 and promises no order, and its non-blocking collectives ask for
    buffers that outlive the call in ways mpi4py does not see to.
    """

    def __init__(
        self, group: MPI.Intracomm, rows: Sequence[Tensor], keys: Sequence[Sequence[int]], like: Tensor
    ) -> None:
        """`rows`: this member's, of the type and shape of `like`, (n,); `keys[m]`: the keys of member m's rows."""
        members = group.size
        part = -(-len(like) // members)
        self.group, self.length = group, len(like)
        self.order = [i for _, i in sorted((key, i) for i, key in enumerate(key for one in keys for key in one))]
        slices = like.new_zeros((members, len(rows), part))  # what goes to each member
        for k, row in enumerate(rows):
            slices[:, k] = torch.nn.functional.pad(row, (0, part * members - self.length)).view(members, part)
        self.parts = like.new_empty((len(self.order), part))
        self.requests = self._exchange(list(slices), list(self.parts.split([len(one) for one in keys])))

    def _exchange(self, out: Sequence[Tensor], into: Sequence[Tensor]) -> list[tuple[MPI.Request, Tensor]]:
        """out[m] to every member m, into[m] from it; the tensors are kept until the requests are done."""
        me = self.group.rank
        into[me].copy_(out[me])
        others = [m for m in range(self.group.size) if m != me]
        requests = [(self.group.Irecv(view(into[m]), m), into[m]) for m in others]
        return requests + [(self.group.Isend(view(out[m]), m), out[m]) for m in others]

    def finish(self) -> Tensor:
        """The sum, shape (n,)."""
        _wait(self.requests)
        total = self.parts[self.order[0]].clone()
        for i in self.order[1:]:
            total += self.parts[i]
        whole = total.new_empty((self.group.size, len(total)))
        _wait(self._exchange([total] * self.group.size, list(whole)))
        return whole.view(-1)[: self.length]


def _wait(requests: list[tuple[MPI.Request, Tensor]]) -> None:
    MPI.Request.Waitall([request for request, _ in requests])
    requests.clear()
