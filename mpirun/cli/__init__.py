"""`python -m mpirun`: its commands and their options. Only `mpirun.__main__` imports it."""
