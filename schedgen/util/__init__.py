"""What every package may use: types of arrays, sorting, errors, files, JSON, progress bars, option types, text
tables, compiled loops, heaps, the version."""
