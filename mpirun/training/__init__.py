"""Training as a library: `Engine`, which scripts drive, on a `Session`, which the command line drives, too."""
