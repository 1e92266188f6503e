"""Why Ray ended, out of what it wrote: one line of it, or ours."""

from __future__ import annotations

import pytest

from serverless_gpu.engines.ray.ray_keeper import _EXIT_CHARACTERS_MAX, why_ended

_AUTH = b"""2026-11-23 00:13:42,987\tERR scripts.py:1307 -- Some Ray subprocesses exited unexpectedly:
2026-11-23 00:13:42,987\tERR scripts.py:87 -- raylet [exit code=1]
[2026-11-23 00:13:42,580 C 26719 26719] (raylet) node_manager.cc:524: GCS returned an authentication error. This may
[state-dump] Number of granted lease arguments: 0
2026-11-23 00:13:43,031\tERR scripts.py:1315 -- Remaining processes will be killed.
"""


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (_AUTH, "the restarted head rejected the old connection, so this machine joins the head again"),
        (b"RuntimeError: Version mismatch: ...", "this machine and the head have different versions of Ray or Python"),
        (b"bind: Address already in use", "another process uses one of Ray's ports"),
        (
            b"x\n2026-11-23 00:13:42,987\tERR scripts.py:87 -- gcs_server [exit code=-9]\ny",
            "its gcs_server ended with -9",
        ),
        (b"a\nb\n----\n\n", "b"),
        (b"2026-11-23 00:13:43,031\tERR scripts.py:1315 -- Remaining processes\n", "Remaining processes"),
        (b"Traceback\nray.exceptions.AuthenticationError: no file\nLocal node IP: 1\n", "AuthenticationError: no file"),
        (b"", "it wrote nothing"),
        (b"\xff\x1b[31m red \x07", "\N{REPLACEMENT CHARACTER}[31m red "),
    ],
)
def test_why_it_ended_is_one_line(written: bytes, why: str) -> None:
    assert why_ended(written) == why


def test_a_line_is_cut() -> None:
    assert len(why_ended(b"x" * 10_000)) == _EXIT_CHARACTERS_MAX
