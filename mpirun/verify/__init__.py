"""--verify: records what a run does, repeats its steps in one process, and compares the two."""
