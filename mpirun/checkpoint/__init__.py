"""--save and --resume: the format on disk, what each rank writes to a checkpoint, and what it takes from one."""
