"""Commands about this machine: `status`, `gpus`, `stop`, `doctor`, `mlflow`. Start with `node.py`."""
