"""Runtime inside the user's environment: zygote, stem, ranks, payloads, calls and failures.

    launcher ─▶ zygote ─▶ stem ─▶ rank      start here: `rank.py`; `protocol.py` defines all messages
    rank: `call.py` `payload.py` `failure.py` `process_group.py` `command.py` `actor.py`, `mlflow/`, `raycluster/`

Code in this directory uses only the standard library and the vendored cloudpickle. The user's environment need not
contain this package. A rank loads the directory from its path under the package name `_sgpu_inside`. Every import in
the directory is therefore relative and stays inside the directory. Pickles written here must also load in a process
that knows the package as `serverless_gpu.node.inside`.
"""
