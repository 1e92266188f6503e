"""SQL and row values, a module per noun; those of runs, attempts and crews are in `runs/`.

Every function takes a connection; services call them in their transactions. Start with `runs/runs.py`.
"""
