"""The canary of a node: a run that tries to break out, and the run of its victim.

`sgpu node canary` and the uplink use this package. Read `examination.py` first. `model/canary.py` describes the
attempts, and `node/inside/canary/` contains their code.
"""
