"""From a profile to a plan: where to cut a model, how often to replicate each part, and which schedule runs it best.

layer_profile.py    layers with their costs, from PipeDream's files or from `mpirun profile`
partition.py        PipeDream's dynamic programme
stage_costs.py      layers gathered into stages, with their costs and their graph
candidates.py       the schedules to try
plan.py             candidates compiled and judged by the simulator
plan_output.py      partitions, plans and found orders, as text and JSON
"""
