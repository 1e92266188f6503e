"""Commands that plan capacity: `sgpu advise` and `sgpu simulate`.

Start with `advise.py` or `simulate.py`; the computation is in `model/billing` and `replay`.
"""
