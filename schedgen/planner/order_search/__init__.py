"""The search for a new order: placement, sizes, costs and a memory limit in, a schedule and a lower bound out."""
