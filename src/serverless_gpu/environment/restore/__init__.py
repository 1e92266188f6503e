"""From a store to a tree that Python can be started in."""
