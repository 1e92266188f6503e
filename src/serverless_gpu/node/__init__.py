"""What runs on a machine with GPUs: agent, supervisor, device locks, and the runtime inside the user's processes."""
