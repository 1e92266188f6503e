"""`sgpu top`: this node live. Monitor ─▶ `data_source.py` ─▶ `table.py` ─▶ `picture.py` ─▶ `terminal.py`."""
