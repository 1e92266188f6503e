"""Runs `sgpu` with the current interpreter: `python -m serverless_gpu.cli`."""

from serverless_gpu.cli import main

main()
