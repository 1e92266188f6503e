"""Runs attempts, each in a child process with a time limit, and prints one line of JSON per attempt.

    {"attempt": "server-key", "outcome": "refused", "detail": "FileNotFoundError: …"}

Outcomes: ``possible``, ``refused``, ``no_target`` (the node prepared none) and ``failed`` (the attempt itself broke).
The outcome of an attempt that never ended is ``failed``. The order of attempts is fixed: attempts on memory come last,
because the kernel may end the whole run with them.
"""

from __future__ import annotations

import json
import os
import select
import signal

from . import communication, exhaustion, files, kernel, leftovers, network, processes
from .base import Attempt, NoTarget, Targets

ATTEMPTS: dict[str, Attempt] = {
    **files.ATTEMPTS,
    **processes.ATTEMPTS,
    **communication.ATTEMPTS,
    **kernel.ATTEMPTS,
    **network.ATTEMPTS,
    **leftovers.ATTEMPTS,
    **exhaustion.ATTEMPTS,
}
POSSIBLE, REFUSED, NO_TARGET, FAILED = "possible", "refused", "no_target", "failed"
_LIMIT_S = 10.0
_DETAIL_CHARACTERS_MAX = 300
_KILLED = (signal.SIGKILL, signal.SIGSYS)  # The kernel ended the child: its memory limit, or its filter of calls.


def main(targets: str) -> None:
    """Run attempts on targets, a JSON object. The list ``only`` selects attempts by name."""
    found = json.loads(targets)
    run(found, found.get("only") or list(ATTEMPTS))


def run(found: dict[str, object], names: list[str]) -> None:
    """Run the named attempts in order, and print their outcomes."""
    own = Targets(found)
    for name in names:
        outcome, detail = _try(ATTEMPTS[name], own)
        line = json.dumps({"attempt": name, "outcome": outcome, "detail": detail[:_DETAIL_CHARACTERS_MAX]})
        os.write(1, f"{line}\n".encode())


def _try(attempt: Attempt, targets: Targets) -> tuple[str, str]:
    """Return the outcome of an attempt in a child process, and its detail."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        os.write(theirs, _outcome(attempt, targets)[:_DETAIL_CHARACTERS_MAX].encode("utf-8", "replace"))
        os._exit(0)
    os.close(theirs)
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    in_time = bool(poll.poll(_LIMIT_S * 1000))
    text = os.read(ours, 4 * _DETAIL_CHARACTERS_MAX).decode("utf-8", "replace") if in_time else ""
    os.close(ours)
    if not in_time:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if text:
        outcome, _, detail = text.partition(" ")
        return outcome, detail
    if not in_time:
        return FAILED, f"the attempt did not end within {_LIMIT_S:.0f} s"
    number = os.WTERMSIG(status)
    outcome = REFUSED if number in _KILLED else FAILED
    return outcome, f"the kernel ended the attempt with signal {number}"


def _outcome(attempt: Attempt, targets: Targets) -> str:
    try:
        attempt(targets)
    except NoTarget as error:
        return f"{NO_TARGET} {error}"
    except OSError as error:
        return f"{REFUSED} {type(error).__name__}: {error.strerror or error}"
    except BaseException as error:  # noqa: BLE001 - one broken attempt must not hide the others
        return f"{FAILED} {type(error).__name__}: {error}"
    return f"{POSSIBLE} "
