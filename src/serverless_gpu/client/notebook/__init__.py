"""Notebooks: the cell magic `%%distributed`, how a cell travels, and the display of a run below a cell.

`%load_ext serverless_gpu` loads `magic.py`.
"""
