"""Pictures of runs, `Run.plot()`: curves, marks and the figure that Matplotlib draws. Start with `timeline.py`."""
