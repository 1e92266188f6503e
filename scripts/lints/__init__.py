"""Our own lints: each one is a convention that ruff cannot see, with its story in the module's docstring.

A lint is a module with `AREAS` (top folders it reads) and `check(source)`, which yields findings. It is added by
naming it in `LINTS` in `__main__.py` and planting one bad and one good snippet in `test_lints.py`. It uses the
standard library only.
"""
