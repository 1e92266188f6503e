"""Commands that plan capacity, computed in `model/billing` and `replay`: `advise.py` and `simulate.py`."""
