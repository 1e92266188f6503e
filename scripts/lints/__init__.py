"""The project's own lints, for conventions that ruff cannot check.

The docstring of each lint explains its convention. A lint is a module with `AREAS` (the top folders that it reads) and
`check(source)`, which yields findings. To add one, name it in `LINTS` in `__main__.py` and add one bad and one good
snippet to `test_lints.py`. A lint uses the standard library only.
"""
