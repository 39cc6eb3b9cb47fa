"""The `schedgen` command. Nobody imports it."""
