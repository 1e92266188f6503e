"""`sgpu top`: this node live, as the monitor sees it.

monitor ──Frame, once a second──▶ feed.py ─▶ table.py: who has what ─▶ picture.py: lines that fit ─▶ terminal.py
"""
