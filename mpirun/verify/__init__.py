"""--verify: the same steps in one process, and how what the ranks did differs."""
