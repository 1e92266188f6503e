"""How a run on several nodes ended, as an exception: the node that failed is named, and who failed because of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client.runs.outcome import Origin, ending_text, make_exception
from serverless_gpu.errors import RunError
from serverless_gpu.model.lifecycle.attempt import Failure, Reason
from serverless_gpu.node.base.protocol import Stopped
from tests.support.client.outcome import RUN, stopped
from tests.support.golden import golden


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "failures").mkdir()
    return tmp_path


def of_a_gang(
    reason: Reason, detail: str = "", *, rank: int | None = None, others: tuple[Failure, ...] = ()
) -> Stopped:
    """Return the end of a run on n1 and n2, as its server tells it: n2 is what failed."""
    told = stopped(reason, detail, rank=rank, consequences=others)
    assert told.cause is not None
    return msgspec.structs.replace(told, cause=msgspec.structs.replace(told.cause, node="n2"))


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        (of_a_gang(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=3), "rank 3 on n2 was ended by SIGSEGV"),
        (
            of_a_gang(Reason.NO_RESULT, "exited with 3", rank=3),
            "rank 3 on n2 exited with 3 before it returned a result",
        ),
        (of_a_gang(Reason.COMMAND_FAILED, "exited with 3", rank=1), "rank 1 on n2: the command exited with 3"),
        (
            of_a_gang(Reason.HOST_OOM, "ended by SIGKILL", rank=3),
            "rank 3 on n2 was ended because host memory ran out (ended by SIGKILL)",
        ),
        (
            of_a_gang(Reason.START_FAILED, "no interpreter"),
            "node n2: the ranks could not start: no interpreter",
        ),
        (
            of_a_gang(Reason.NODE_DISK, "2 GB are free"),
            "node n2: the node's disk is too full for the environment: 2 GB are free",
        ),
        (of_a_gang(Reason.NODE_GONE), "node n2: the node did not reconnect"),
        (
            of_a_gang(Reason.GPU_LOST, "GPU-7 fell off the bus"),
            "node n2: a GPU of the run failed: GPU-7 fell off the bus",
        ),
    ],
)
def test_of_a_gang_the_node_is_named_that_failed(directory: Path, ending: Stopped, message: str) -> None:
    error = make_exception(ending, directory, RUN, None, Origin("n1, n2"))
    assert isinstance(error, RunError) and error.message == message
    assert "n1" not in (error.hint or "")


def test_what_failed_on_the_other_node_is_a_consequence_with_its_name(directory: Path) -> None:
    other = Failure(rank=0, reason=Reason.RANK_RAISED, at_ns=2, detail="RuntimeError: reset", node="n1")
    gone = Failure(rank=None, reason=Reason.NODE_GONE, at_ns=0, node="n3")
    ending = of_a_gang(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=3, others=(other, gone))
    told = ending_text(ending, directory, RUN, None, Origin("n1, n2, n3"))
    assert golden("client.gang_outcome.consequence-rank-n1") in told
    assert golden("client.gang_outcome.consequence-attempt-n3") in told
