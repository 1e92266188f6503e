"""The calling process: its context and variables, program, MLflow and signals. Start with `caller_context.py`."""
