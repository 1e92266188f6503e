"""The caller's side: checks before a run, the run itself, and exceptions as the caller sees them."""
