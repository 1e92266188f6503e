"""Long-running MLflow servers: one per store, for all users of a home that track runs.

    monitor, `sgpu mlflow` ──ensure_server──▶ lock held? ─▶ the keeper's record: address, ready or the problem
                                              free       ─▶ start a keeper, a clean process of this package
    `sgpu up --mlflow` ─────── keeper, which ends with the server       └─▶ `mlflow server`, in the caller's interpreter

`server.py` starts, queries and ends MLflow servers, and defines the paths of their files. `keeper.py` is the process
that runs one MLflow server.
"""
