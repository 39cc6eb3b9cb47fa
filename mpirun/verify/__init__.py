"""--verify: records what a run does, does the same steps in one process, and compares the two."""
