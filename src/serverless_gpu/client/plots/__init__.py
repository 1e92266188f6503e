"""Pictures of runs: curves and marks as values, and the figure that Matplotlib draws from them.

`Run.plot()` (`client/runs/run_plot.py`) calls it. Start with `curves.py`.
"""
