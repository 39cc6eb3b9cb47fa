"""Training as a library: `Engine`, which a script drives, and which the command line drives too."""
