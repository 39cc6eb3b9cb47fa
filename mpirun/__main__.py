"""`mpiexec -n W python -m mpirun FILE --model MODULE:FUNCTION`, and `python -m mpirun profile` or `graph`."""

import sys

from mpirun.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
