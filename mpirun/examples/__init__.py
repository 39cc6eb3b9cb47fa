"""Example models: functions from the number of stages to a `Model`, as `--model MODULE:FUNCTION` names them."""
