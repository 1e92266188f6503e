"""Long-running MLflow servers: one server per store, shared by all users of an installation.

    monitor, `sgpu mlflow` ──ensure_server──▶ lock held? ─▶ the keeper's record: address, ready or the problem
                                              free       ─▶ start a keeper, a clean process of this package
    `sgpu up --mlflow` ─────── keeper, which ends with the server       └─▶ `mlflow server`, in the caller's interpreter

`server.py` starts, queries and ends MLflow servers and defines the paths of their files. `keeper.py` implements the
process that runs one MLflow server.
"""
