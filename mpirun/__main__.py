"""The entry point of `python -m mpirun FILE --model MODULE:FUNCTION`, and of the commands `profile` and `graph`."""

import sys

from mpirun.comm.local_gpu import use_local_gpu

if __name__ == "__main__":
    use_local_gpu(sys.argv[1:])
    from mpirun.cli.main import main  # imports MPI

    sys.exit(main())
