"""Training loops by hand: the time that is left without any framework.

`Floor` is 1F1B on two ranks. Receives are posted a microbatch ahead, into two buffers each of which has a persistent
request; sends go straight from the tensors that torch made. `data_parallel` sums flat gradients by one Allreduce;
on one rank it is the plain loop, without any message.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor, nn


def view(tensor: Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), 4 * tensor.numel()), tensor.numel(), MPI.FLOAT]


class Training(NamedTuple):
    """What a rank trains, and with what."""

    comm: MPI.Intracomm
    module: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int, int], tuple[Tensor, Tensor]]  # of a step and a microbatch
    loss: Callable[[Tensor, Tensor], Tensor]
    microbatches: int  # of a step, over all ranks


class Floor:
    def __init__(self, training: Training) -> None:
        comm, module, self.optimizer, batch, self.loss, self.microbatches = training
        self.comm, self.module, self.batch = comm, module, batch
        self.share = torch.tensor(1 / self.microbatches)  # the gradient is the mean over the microbatches
        self.other = 1 - comm.rank
        with torch.no_grad():
            # The gradients that rank 0 receives have the shape of the outputs that it sends.
            like = comm.bcast(module(batch(0, 0)[0]) if comm.rank == 0 else None)
        self.buffers = [torch.empty_like(like) for _ in range(2)]
        self.receives = [comm.Recv_init(view(buffer), self.other) for buffer in self.buffers]
        for receive in self.receives:
            atexit.register(receive.Free)
        self.step = self.first if comm.rank == 0 else self.last

    def first(self, step: int) -> Sequence[Tensor]:
        """Rank 0: F0 F1 B0 F2 B1 ... B."""
        module, batch, count = self.module, self.batch, self.microbatches
        receives, buffers = self.receives, self.buffers
        self.optimizer.zero_grad()
        outputs: list[Tensor] = []
        sends: list[MPI.Request] = []

        def forward(mb: int) -> None:
            output = module(batch(step, mb)[0])
            sends.append(self.comm.Isend(view(output), self.other))
            outputs.append(output)

        receives[0].Start()
        forward(0)
        for mb in range(count):
            if mb + 1 < count:
                receives[(mb + 1) % 2].Start()
                forward(mb + 1)
            receives[mb % 2].Wait()
            sends[mb].Wait()  # its gradient has arrived, so the send is complete
            outputs[mb].backward(buffers[mb % 2])
            outputs[mb] = buffers[0]  # frees the graph
        self.optimizer.step()
        return []

    def last(self, step: int) -> Sequence[Tensor]:
        """Rank 1: F0 B0 F1 B1 ..."""
        module, batch, count = self.module, self.batch, self.microbatches
        receives, buffers = self.receives, self.buffers
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        send: MPI.Request | None = None
        receives[0].Start()
        for mb in range(count):
            target = batch(step, mb)[1]
            receives[mb % 2].Wait()
            if mb + 1 < count:
                receives[(mb + 1) % 2].Start()
            x = buffers[mb % 2].detach().requires_grad_()
            loss = self.loss(module(x), target)
            loss.backward(self.share)
            losses.append(loss.detach())
            if send is not None:
                send.Wait()
            gradient = x.grad  # frees the previous one, whose send is complete
            assert gradient is not None
            send = self.comm.Isend(view(gradient), self.other)
        self.optimizer.step()
        if send is not None:
            send.Wait()
        return losses


def data_parallel(training: Training) -> Callable[[int], Sequence[Tensor]]:
    """The step of a rank that does every `comm.size`-th microbatch; gradients are views into one flat tensor."""
    comm, module, optimizer, batch, loss, microbatches = training
    parameters = list(module.parameters())
    device = parameters[0].device
    share = torch.tensor(1 / microbatches, device=device)
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters) if comm.size > 1 else 0, device=device)

    def step(number: int) -> Sequence[Tensor]:
        if comm.size == 1:
            optimizer.zero_grad()
        else:
            flat.zero_()
        losses = []
        for mb in range(comm.rank, microbatches, comm.size):
            data, target = batch(number, mb)
            one = loss(module(data), target)
            one.backward(share)
            losses.append(one.detach())
        if comm.size > 1:
            comm.Allreduce(MPI.IN_PLACE, view(flat))
        optimizer.step()
        return losses

    if comm.size > 1:
        for parameter, piece in zip(parameters, flat.split([x.numel() for x in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter)
    return step
