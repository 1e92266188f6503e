"""Commands that plan capacity. `model/billing` and `replay` compute their results."""
