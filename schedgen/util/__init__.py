"""What every room may use: errors, files, progress bars, option types, text tables, compiled loops, heaps."""
