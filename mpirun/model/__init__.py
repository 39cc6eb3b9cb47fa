"""What a model is to the runtime: the contract, a stage's module, values between stages, shapes, random numbers.

No MPI: all of it is the same on every rank. What depends on a device takes it as an argument.
"""
