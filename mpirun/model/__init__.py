"""What a model is to the runtime: the contract, a stage's module, values between stages, shapes, random numbers.

No MPI, no device: all of it is the same on every rank.
"""
