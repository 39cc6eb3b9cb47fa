"""Scheme in, program out: place, refine, order, lower."""
