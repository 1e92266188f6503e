"""The monitor: one process per installation that samples the node and delivers runs to MLflow.

The agent starts the monitor (`start_stop.py`). Supervisors and `sgpu top` connect to the monitor (`messages.py`). Start
reading the code at `process.py`, whose docstring contains an overview and the failure cases.
"""
