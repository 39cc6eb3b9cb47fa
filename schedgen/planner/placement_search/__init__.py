"""The search for a placement: sizes, costs and a memory limit in, a worker for each stage, an order and a bound out.

stage_sets.py        lower bounds for a worker with a set of stages, and so for any placement
families.py          the placements of built-in schemes
near_placements.py   placements changed a little, judged by bounds and a cheap search
search_placement.py  the whole search: families, changes, and an order for the best of them
"""
