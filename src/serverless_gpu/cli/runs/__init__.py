"""Commands about runs, of this machine or of the server. `run_location.py` finds a run, `run_choice.py` chooses one."""
