"""Usage: sums of the ledger for reports, and its rows for billing tables."""

from __future__ import annotations
