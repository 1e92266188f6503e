"""Devices of a node: GPUs through NVML, locks and quarantine, the gate for free memory, the kernel's log.

The supervisor reserves (`reservation.py`) and gives back (`gpu_gate.py`). Start with `inventory.py`.
"""
