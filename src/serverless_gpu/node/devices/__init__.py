"""Devices of a node: GPUs through NVML, locks and quarantine, the GPU gate, the kernel log.

The supervisor reserves devices (`reservation.py`) and verifies that they are free after the run (`gpu_gate.py`). To
read the code, start with `inventory.py`.
"""
