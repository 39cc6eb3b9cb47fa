"""What every room may use: errors, files, JSON, progress bars, option types, text tables, compiled loops,
heaps, sorting, the version."""
