"""One node's share of a run's private Ray cluster; standard library only, like everything in `inside`."""
