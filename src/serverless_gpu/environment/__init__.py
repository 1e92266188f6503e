"""What Python sees, as content-addressed units: recognised, captured, stored, restored."""
