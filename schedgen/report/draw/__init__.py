"""Pictures of schedules: rows are workers, time runs to the right."""
