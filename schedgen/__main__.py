"""`python -m schedgen` is the `schedgen` command."""

import gc
import sys


def main() -> int:
    """Run the command; an interrupt prints one line, even while modules are being imported."""
    gc.disable()  # what is imported stays: searching it for garbage takes a tenth of the time
    try:
        from schedgen.cli.main import main as run

        gc.freeze()
        gc.enable()
        return run()
    except KeyboardInterrupt:
        print("schedgen: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
