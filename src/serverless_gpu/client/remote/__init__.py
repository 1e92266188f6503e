"""`remote=True`: calls that run through a server. Loaded with the first of them, not before (HTTP costs 50 ms)."""
