"""The samples of a step: the training text, and the microbatches made from it. No MPI: every rank makes its own."""
