"""Devices of a node: GPUs through NVML, locks, the gate for free memory, Xid history, quarantine.

The supervisor reserves (`reservation.py`) and gives back (`gpu_gate.py`). Start with `gpus.py`.
"""
