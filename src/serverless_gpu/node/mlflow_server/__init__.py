"""An MLflow server that stays: one in front of each store, for everybody in a home who tracks runs.

    monitor, `sgpu mlflow` ──ensure_server──▶ lock held? ─▶ what the keeper wrote: address, ready or why not
                                              free       ─▶ keeper, a clean process of ours
    `sgpu up --mlflow` ─────── keeper, ended with it       └─▶ `mlflow server`, in the caller's interpreter

`server.py` asks, starts and ends servers, and knows their files; `keeper.py` is the process that runs one.
"""
