"""The monitor: one process per home that samples the node, and tells MLflow what runs do.

The agent starts it (`start_stop.py`), supervisors and `sgpu top` connect (`messages.py`). Start with `process.py`; its
docstring has the picture and the failure cases.
"""
