"""Scheme in, program out: refine, place, order, lower."""
