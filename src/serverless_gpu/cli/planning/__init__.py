"""Commands that plan capacity. The packages `model/billing` and `replay` compute the results."""
