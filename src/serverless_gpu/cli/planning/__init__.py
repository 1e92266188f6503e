"""Commands that plan capacity. `model/billing` and `replay` compute the results of these commands."""
