"""The instruction list: instructions and what they mean, the header, the program, and its file.

Imports `util` only; all other packages build on it.
"""
