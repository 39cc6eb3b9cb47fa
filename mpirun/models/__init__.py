"""Models to begin with; each module's functions follow the contract in `mpirun.model.contract`."""
