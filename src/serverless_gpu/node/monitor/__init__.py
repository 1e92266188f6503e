"""The monitor: one process per home that samples the node and delivers runs to MLflow.

The agent starts it (`start_stop.py`); supervisors and `sgpu top` connect to it (`messages.py`). Start with
`process.py`: its docstring has the picture and the failure cases.
"""
