"""An MLflow server that stays: one in front of each store, for everybody in a home who tracks runs.

    monitor, `sgpu mlflow` ──ensure_server──▶ lock held? ─▶ what the keeper wrote: address, ready or why not
                                              free       ─▶ keeper, a clean process of ours
    `sgpu up --mlflow` ─────── keeper, ended with it       └─▶ `mlflow server`, in the caller's interpreter

`control.py` asks and starts, `keeper.py` is the process, `files.py` files, ports and stores, `program.py` what runs in
the caller's interpreter, `error_summary.py` what its last words mean.
"""
