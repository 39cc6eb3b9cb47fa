"""`python -m schedgen` is the `schedgen` command."""

from schedgen.cli.main import main

raise SystemExit(main())
