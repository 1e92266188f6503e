"""Devices of a node: GPUs through NVML, locks and quarantine, the gate for free memory, kernel log.

The supervisor reserves devices (`reservation.py`) and verifies them on return (`gpu_gate.py`). Start with
`inventory.py`.
"""
