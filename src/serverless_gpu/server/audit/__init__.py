"""The audit: its routes, the loop that chains its rows, and the check of the chain.

Entries are written by `records/audit.py` in the transaction of the change. Start with `chain_writer.py`.
"""
