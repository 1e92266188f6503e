"""Defines GPU types as an enumeration: `from serverless_gpu.compute import GPUType`."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["GPUType"]


class GPUType(StrEnum):
    """GPU types of the catalogue. Every API also accepts a GPU type's name as a string."""

    A10 = "A10"
    A10G = "A10G"
    A100 = "A100"
    B200 = "B200"
    GH200 = "GH200"
    H100 = "H100"
    H200 = "H200"
    L4 = "L4"
    L40S = "L40S"
    T4 = "T4"
    V100 = "V100"
    CPU = "CPU"

    @classmethod
    def _missing_(cls, value: object) -> GPUType | None:
        wanted = str(value).upper()
        return next((member for member in cls if member.value == wanted), None)
