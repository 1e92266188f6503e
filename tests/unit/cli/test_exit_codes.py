"""What a command exits with for how its run ended."""

from __future__ import annotations

import pytest

from serverless_gpu.cli.exit_codes import exit_code
from serverless_gpu.errors import (
    CommandFailed,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RunCancelled,
    RunError,
    RunTimedOut,
    RuntimeLost,
    ServerProblem,
    ServerUnavailable,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("a rank's own"), 1),
        (RunError(), 1),
        (NodeLost(), 75),
        (RuntimeLost(), 137),
        (ServerUnavailable(), 75),
        (ServerProblem(), 1),
        (RunTimedOut(), 124),
        (RunCancelled(), 130),
        (KeyboardInterrupt(), 130),
        (RankCrashed(), 137),
        (OutOfMemory(), 137),
    ],
)
def test_how_a_run_ended_is_an_exit_code(error: BaseException | None, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(("own", "code"), [(3, 3), (255, 255), (0, 1), (256, 1), (-9, 1)])
def test_a_program_s_own_exit_code_is_passed_on_where_a_shell_can_have_it(own: int, code: int) -> None:
    error = CommandFailed()
    error.exit_code = own
    assert exit_code(error) == code
