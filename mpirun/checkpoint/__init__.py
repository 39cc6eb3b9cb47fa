"""--save and --resume: the format on disk, what every rank writes, and what it takes from what others wrote."""
