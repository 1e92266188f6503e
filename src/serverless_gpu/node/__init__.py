"""The code of a machine with GPUs: agent, supervisor, device locks, and the runtime in user processes."""
