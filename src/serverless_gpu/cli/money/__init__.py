"""Commands about money: `budget`, `price`, `usage`, and reports as CSV and Parquet.

Each module is one command group. Start with `usage.py`.
"""
