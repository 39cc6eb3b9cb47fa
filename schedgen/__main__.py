"""`python -m schedgen` is the `schedgen` command."""

from schedgen.cli import main

raise SystemExit(main())
