"""Commands about nodes, pools, the queue and shares. Start with `nodes.py`."""
