"""What a list costs: time and bytes on a machine, and how far that is from the best possible."""
