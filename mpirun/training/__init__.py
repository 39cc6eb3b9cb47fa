"""Training as a library: `Engine`, for scripts, is built on `Session`, which the command line uses too."""
