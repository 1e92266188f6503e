"""The monitor: one process per home that samples the node and delivers runs to MLflow.

The agent starts the monitor (`start_stop.py`). Supervisors and `sgpu top` connect to it (`messages.py`). To read the
code, start with `process.py`: its docstring has an overview and the failure cases.
"""
