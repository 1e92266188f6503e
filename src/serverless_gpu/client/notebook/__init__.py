"""Notebooks: the cell magic `%%distributed` and the display of a run below a cell. Start with `magic.py`."""
