"""From a profile to a plan: where to cut a model, how often to replicate each part, and which schedule runs it best."""
