"""The canary of a node: two runs of scratch principals, one of which tries to break out.

`sgpu node canary` and the uplink use this package. Read `examination.py` first. `model/canary.py` describes the
attempts, and `node/inside/canary/` contains their code.
"""
