"""`python -m mpirun`: its commands and their options. Nobody imports it."""
