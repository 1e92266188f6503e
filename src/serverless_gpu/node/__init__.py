"""Code that runs on a GPU node: agent, supervisor, device locks, and the runtime of user processes."""
