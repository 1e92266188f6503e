"""Commands about this machine: `status`, `gpus`, `stop`, `doctor`, `mlflow`, `top`. Start with `node.py`."""
