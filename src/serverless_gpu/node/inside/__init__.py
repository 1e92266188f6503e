"""The runtime that lives in the user's own environment: zygote, stem, ranks; payloads, the call, failures.

    launcher ─▶ zygote ─▶ stem ─▶ rank      start here: `rank.py`; `protocol.py` has all messages
    rank: `call.py` `payload.py` `failure.py` `process_group.py` `command.py` `actor.py`, `mlflow/`, `raycluster/`

Only the standard library and the vendored cloudpickle may be used here, and nothing of ours need be installed there: in
a rank this directory is loaded from its path under the package name `_sgpu_inside`, so every import in it is relative
and stays inside it. What it writes must load in a process that knows it by its other name,
`serverless_gpu.node.inside`.
"""
