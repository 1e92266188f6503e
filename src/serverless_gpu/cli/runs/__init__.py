"""Commands about runs, of this machine or of the server. `run_location.py` finds the run that is meant."""
