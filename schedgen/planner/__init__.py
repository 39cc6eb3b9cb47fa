"""From a profile to a plan: where to cut a model, how often to replicate each part, and which schedule runs it best.

profile.py    layers with their costs, from PipeDream's files or from `mpirun profile`
cuts.py       the ways to cut a graph of layers in two
partition.py  PipeDream's dynamic programme over a hierarchy of workers
stages.py     layers made into stages, with their costs
search.py     the compiler's schemes for them, judged by the simulator
words.py      what both found as tables and as JSON
"""
