"""MPI between ranks: messages, ordered sums, the thread that keeps them moving, devices."""
