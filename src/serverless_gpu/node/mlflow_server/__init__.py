"""An MLflow server that stays: one in front of each store, for everybody in a home who tracks runs.

    monitor, `sgpu mlflow` ──ensure_server──▶ lock held? ─▶ what the keeper wrote: address, ready or why not
                                              free       ─▶ keeper, a clean process of ours
    `sgpu up --mlflow` ─────── keeper, ended with it       └─▶ `mlflow server`, in the caller's interpreter

`server.py` asks and starts, and knows files, ports and stores; `keeper.py` is the process, with the program that runs in
the caller's interpreter.
"""
