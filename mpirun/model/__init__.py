"""What a model is to the runtime: its stages, what they read of one another, shapes, random numbers. No MPI."""
