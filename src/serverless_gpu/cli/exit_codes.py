"""Exit codes of `sgpu` commands for shells and job schedulers.

    0     success
    N     the program's own exit code, 1 to 255, if that ended the run
    75    the run or its node is lost, or the server is unreachable; a retry may help (EX_TEMPFAIL)
    124   the run reached its timeout (as in timeout(1))
    130   the run was cancelled, or the user pressed Ctrl-C
    137   a signal or the out-of-memory killer ended a rank (128 + SIGKILL, for every signal)
    1     any other failure, such as an exception of a rank
    2     the command line was wrong, and nothing was started (the code of click)

`exit_code` maps an exception to an exit code.
"""

from __future__ import annotations

from serverless_gpu.errors import (
    CommandFailed,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RunCancelled,
    RunTimedOut,
    RuntimeLost,
    ServerUnavailable,
)

TEMPORARY, TIMED_OUT, CANCELLED, KILLED, FAILED, USAGE = 75, 124, 130, 137, 1, 2
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (RunTimedOut, TIMED_OUT),
    (RunCancelled, CANCELLED),
    (KeyboardInterrupt, CANCELLED),
    (RankCrashed, KILLED),
    (OutOfMemory, KILLED),
    (RuntimeLost, KILLED),
    (NodeLost, TEMPORARY),
    (ServerUnavailable, TEMPORARY),
)


def exit_code(error: BaseException | None) -> int:
    """Return the exit code for an error, or 0 without an error."""
    if error is None:
        return 0
    if isinstance(error, CommandFailed):
        return error.exit_code if 0 < error.exit_code < 256 else FAILED
    return next((code for cls, code in _CODES if isinstance(error, cls)), FAILED)
