"""Commands about money: `budget`, `price`, `usage`, and reports as CSV and Parquet. Start with `usage.py`."""
