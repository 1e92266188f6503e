"""`sgpu submit`: a script or a program as a run, and its dry run. Start with `submit.py`."""
