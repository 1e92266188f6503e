"""Attempts to break out of a run, which `sgpu node canary` starts in a run and, as controls, without isolation.

    runner ─ one child process per attempt ─▶ files · processes · communication · kernel · network · exhaustion
           ─ one line of JSON per attempt  ─▶ standard output

`model/canary.py` describes each attempt. Read `base.py` first, then `runner.py`. An attempt returns if it succeeds. An
attempt raises OSError if the machine refuses it. Attempts change nothing outside of the targets that the node prepared:
they open files without writing, send signal 0, and call the kernel with arguments that it rejects after the check of
the caller's rights.
"""
