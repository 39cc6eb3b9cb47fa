"""The `schedgen` command. No other room imports it."""
