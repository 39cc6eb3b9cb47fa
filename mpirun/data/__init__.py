"""Microbatches: of a script's datasets, by loaders, and of the command line's text.

No MPI: every rank makes its own.
"""
