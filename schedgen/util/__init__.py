"""What every package may use: types of arrays, errors, files, JSON, progress bars, option types, text tables, the
terminal, compiled loops, heaps, sorting, the version."""
