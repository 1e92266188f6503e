"""Attempts to break out of a run, for `sgpu node canary`.

    runner ─ one child process per attempt ─▶ files · processes · communication · kernel · network · exhaustion
           ─ one line of JSON per attempt  ─▶ standard output

The node runs the attempts in a run and, as controls, without isolation. `model/canary.py` describes each attempt. Read
`base.py` first, then `runner.py`. An attempt returns if it succeeds, and raises OSError if the machine refuses it.

Attempts harm no machine, even as root without isolation. Attempts open files without writing to them, and send only
signal 0. The arguments of dangerous system calls are invalid. The kernel rejects invalid arguments only after it has
checked the caller's rights.
"""
