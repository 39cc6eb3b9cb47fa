"""MPI between ranks: devices, messages, waiting, ordered sums, progress during computations, errors of all ranks."""
