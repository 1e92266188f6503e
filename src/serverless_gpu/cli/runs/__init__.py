"""Commands about runs, of this machine or of the server: `runs`, `show`, `logs`, `result`, `cancel`, `clean`.

`run_location.py` finds where a run is, `run_choice.py` which one a person means.
"""
