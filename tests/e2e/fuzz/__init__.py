"""Garbage, on purpose: whatever is sent or printed, everything of ours goes on and says what was wrong."""
