"""Hardware: the catalogue of GPU types, Xid errors, and hours in which a machine is shared.

Placement, doctor, prices and the node call it. Start with `gpu_types.py`.
"""
