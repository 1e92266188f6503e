"""Devices of a node: A node's devices: NVML, locks, quarantine, GPU gate and kernel log.

The supervisor reserves devices (`reservation.py`) and verifies them after the run (`gpu_gate.py`). To read the code,
start with `inventory.py`.
"""
