"""Commands about money: use and cost, budgets and prices."""
