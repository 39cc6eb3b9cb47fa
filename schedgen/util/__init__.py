"""What every room may use: errors, files, progress bars, option types, compiled loops."""
