"""Where gangs can be placed."""
