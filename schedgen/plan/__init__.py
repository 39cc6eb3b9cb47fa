"""From a profile to a plan: where to cut a model, how often to replicate each part, and which schedule runs it best.

profile.py    layers with their costs, from PipeDream's files or from `mpirun profile`
cuts.py       the ways to cut a graph of layers in two
partition.py  PipeDream's dynamic programme over a hierarchy of workers
words.py      a partition as a table and as JSON
"""
