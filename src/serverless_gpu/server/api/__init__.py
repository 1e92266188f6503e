"""Routes: one module per noun, each with `routes`; how they are written stands at the head of `routing.py`."""
