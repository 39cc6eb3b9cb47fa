"""The version of schedgen, as named in the files that it writes."""

__version__ = "0.1.0"
