"""Commands for runs of this machine or of the server. `run_location.py` finds the requested run."""
