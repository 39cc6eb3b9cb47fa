"""What a person or another tool sees of a schedule: pictures, diffs, comparisons, exports."""
