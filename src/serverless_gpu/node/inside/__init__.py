"""Runtime inside the user's environment: zygote, stem, ranks, payloads, calls and failures.

    launcher ─▶ zygote ─▶ stem ─▶ rank      start here: `rank.py`; `protocol.py` defines all messages
    rank: `call.py` `payload.py` `failure.py` `process_group.py` `command.py` `actor.py`, `mlflow/`, `raycluster/`

Code in this directory imports only the standard library and the vendored cloudpickle, because the user's environment
may lack `serverless_gpu`. A rank loads the directory from its path under the package name `_sgpu_inside`. All imports
between the directory's modules are therefore relative. Pickles that a rank writes must also load in a process that
imports the package as `serverless_gpu.node.inside`.
"""
