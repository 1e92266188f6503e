"""`python -m serverless_gpu.cli`: the command `sgpu` of exactly this interpreter."""

from serverless_gpu.cli import main

main()
