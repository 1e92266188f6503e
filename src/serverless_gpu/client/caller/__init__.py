"""The calling process: its program, context, MLflow, module origins and signals. Start with `caller_context.py`."""
