"""`python -m schedgen` is the `schedgen` command."""

import sys


def main() -> int:
    """Run the command; an interrupt prints one line, even while modules are being imported."""
    try:
        from schedgen.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("schedgen: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
