"""Microbatches: made by loaders from a script's datasets, or from the command line's text.

No MPI: every rank makes its own.
"""
