"""What is there: roots, distributions, code, and whether any of it has changed."""
