"""The core: what every step executes, whatever the schedule. Its `context` says what it asks of the features around."""
