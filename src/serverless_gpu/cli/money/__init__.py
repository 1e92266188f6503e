"""Commands about money: usage and cost, budgets and prices."""
