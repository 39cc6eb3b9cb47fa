"""The `schedgen` command. No other package imports it."""
