"""The instruction list: instructions and what they mean, the header, the program, and its file.

Imports `util` only; everything else reads it."""
