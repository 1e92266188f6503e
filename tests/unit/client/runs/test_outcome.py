"""How a run ended, as an exception: the class and the whole message for every reason."""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client.runs.outcome import Origin, ending_text, load_result, make_exception
from serverless_gpu.errors import (
    BudgetExhausted,
    CollectiveHang,
    EngineHeadLost,
    NodeLost,
    OutOfMemory,
    RankCrashed,
    RemoteError,
    ResultNotSerializable,
    ResultTooLarge,
    ResultUnavailableHere,
    RunCancelled,
    RunError,
    RunTimedOut,
    RuntimeLost,
)
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Failure, Hang, Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base.protocol import Stopped
from serverless_gpu.node.inside import failure, payload
from tests.support.client.outcome import RUN, stopped
from tests.support.golden import golden


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("logs", "results", "failures"):
        (tmp_path / name).mkdir()
    return tmp_path


def write_record(directory: Path, rank: int, **fields: object) -> None:
    (directory / "failures" / f"{rank}.json").write_text(json.dumps(fields))


def write_raised(directory: Path, rank: int, error: BaseException) -> None:
    pickled = failure.pickle_exception(error)
    if pickled is not None:
        (directory / "failures" / f"{rank}.pkl").write_bytes(pickled)
    write_record(directory, rank, **failure.describe(error), pickled=pickled is not None)


# --- endings that no exception of the user explains ------------------------------------------------------------------

OWNED = "the ranks' parent process died"
OURS = (Reason.START_FAILED, Reason.RUNTIME_LOST, Reason.SUPERVISOR_LOST, Reason.SUPERVISOR_KILLED)
ENDINGS: dict[str, tuple[Stopped, type[RunError], str]] = {
    "F01 signal": (
        stopped(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=3),
        RankCrashed,
        "rank 3 was ended by SIGSEGV",
    ),
    "signal without a word": (
        stopped(Reason.RANK_SIGNAL, rank=3),
        RankCrashed,
        "rank 3: a signal ended a rank",
    ),
    "F07 no result": (
        stopped(Reason.NO_RESULT, "exited with code 0", rank=0),
        RankCrashed,
        "rank 0 exited with code 0 before it returned a result",
    ),
    "F02 memory of the whole run": (
        stopped(Reason.HOST_OOM, OWNED),
        OutOfMemory,
        "the ranks were ended because host memory ran out",
    ),
    "F73 time limit": (
        stopped(Reason.TIMEOUT, cause=False),
        RunTimedOut,
        "the run reached its time limit of 90 s (ranks get SIGTERM one grace period earlier)",
    ),
    "cancelled": (stopped(Reason.CANCELLED, cause=False), RunCancelled, "the run was cancelled"),
    "F71 budget": (
        stopped(Reason.BUDGET, cause=False),
        BudgetExhausted,
        "the server stopped the run to stay within a budget",
    ),
    "supervisor": (
        stopped(Reason.SUPERVISOR_KILLED, cause=False),
        NodeLost,
        "the run's supervisor process died, without evidence that the machine failed",
    ),
    "supervisor, with evidence": (
        stopped(Reason.SUPERVISOR_LOST, "the machine has restarted since"),
        NodeLost,
        "the run's supervisor process died because its machine failed: the machine has restarted since",
    ),
    "F18 node": (stopped(Reason.NODE_LOST), NodeLost, "the node stopped answering"),
    "F04 hang, and nothing more is known": (
        stopped(Reason.COLLECTIVE_HANG, cause=False),
        CollectiveHang,
        "the ranks made no progress and wrote no output within hang_timeout",
    ),
    "start": (
        stopped(Reason.START_FAILED, "no interpreter"),
        RunError,
        "the ranks could not start: no interpreter",
    ),
    "F13 rendezvous": (
        stopped(Reason.RENDEZVOUS, "no rendezvous port could be reserved: 4711 (Address already in use)"),
        RunError,
        "no free rendezvous port was found: no rendezvous port could be reserved: 4711 (Address already in use)",
    ),
    "stem": (stopped(Reason.RUNTIME_LOST, "killed from outside"), RuntimeLost, f"{OWNED}: killed from outside"),
}


def logs_hint(directory: Path, rank: int | None) -> str:
    """Return where the output of a rank is, as an error says it."""
    option = "" if rank is None else f" --rank {rank}"
    return f"logs: `sgpu logs {RUN}{option}` (files: {directory / 'logs'})"


@pytest.mark.parametrize(("ending", "cls", "message"), ENDINGS.values(), ids=ENDINGS)
def test_the_class_and_the_whole_message(directory: Path, ending: Stopped, cls: type[RunError], message: str) -> None:
    error = make_exception(ending, directory, RUN, RunSpec(timeout_s=90.0))
    assert type(error) is cls
    ours = ending.reason in OURS
    log = directory.parents[2] / "agent.log"
    hint = (
        f"the run's files: {directory}; log of the agent and its processes: {log}"
        if ours
        else logs_hint(directory, error.rank)
    )
    if cls is RuntimeLost:
        hint = f"the run's user may have ended this process; set retries=1 for another attempt; {hint}"
    assert str(error) == f"{message}\nhint: {hint}"
    failed = ending.state is State.FAILED and ending.cause is not None
    assert error.__dict__ == {
        "message": message,
        "hint": hint,
        "run_id": RUN,
        "rank": ending.cause.rank if failed and ending.cause is not None else None,
        "reason": ending.reason.value,
        "log_tail": "",
    }


def test_a_time_limit_that_is_not_known_is_not_named(directory: Path) -> None:
    error = make_exception(stopped(Reason.TIMEOUT, cause=False), directory, RUN, None)
    assert isinstance(error, RunTimedOut) and error.message == golden("client.outcome.run-reached-time")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            RunSpec(max_run_s=8.0, policy="llm"),
            "the run reached its time limit of 8 s: usage policy 'llm' sets this maximum for an attempt; with "
            "resume=True the run continues as another attempt",
        ),
        (
            RunSpec(max_run_s=8.0, timeout_s=9.0),
            "the run reached its time limit of 8 s: the server sets this maximum for an attempt; with resume=True the "
            "run continues as another attempt",
        ),
        (
            RunSpec(max_run_s=8.0, timeout_s=7.0, policy="llm"),
            "the run reached its time limit of 7 s (ranks get SIGTERM one grace period earlier)",
        ),
    ],
)
def test_a_time_limit_that_its_user_did_not_set_is_said_to_be_another_s(
    directory: Path, spec: RunSpec, says: str
) -> None:
    ending = stopped(Reason.TIMEOUT, cause=False)
    error = make_exception(ending, directory, RUN, spec)
    assert isinstance(error, RunTimedOut) and error.message == says
    assert ending_text(ending, directory, RUN, spec).splitlines()[0] == says


def test_a_run_that_was_stopped_for_idleness_says_what_keeps_one(directory: Path) -> None:
    ending = stopped(Reason.IDLE, cause=False)
    error = make_exception(ending, directory, RUN, RunSpec(idle_timeout_s=6.0, timeout_s=90.0))
    assert isinstance(error, RunTimedOut)
    assert str(error) == golden("client.outcome.run-did-nothing", logs_hint=logs_hint(directory, None))


def test_F02_a_rank_killed_for_memory_says_memory(directory: Path) -> None:
    error = make_exception(stopped(Reason.HOST_OOM, "ended by SIGKILL", rank=1), directory, RUN, None)
    assert isinstance(error, OutOfMemory)
    assert (error.rank, "memory" in error.message, "rank 1" in error.message) == (1, True, True)


def test_what_is_known_twice_is_said_once(directory: Path) -> None:
    error = make_exception(stopped(Reason.RUNTIME_LOST, OWNED), directory, RUN, None)
    assert isinstance(error, RuntimeLost)
    assert error.message.count(OWNED) == 1


@pytest.mark.parametrize("reason", [Reason.CANCELLED, Reason.BUDGET])
def test_what_a_rank_said_after_a_stop_is_not_why_the_run_stopped(directory: Path, reason: Reason) -> None:
    late = stopped(reason, "ConnectionError: peer closed", rank=1)
    error = make_exception(late, directory, RUN, None)
    assert isinstance(error, RunError)
    assert (error.message, error.rank) == (MEANINGS[reason].sentence, None)


# --- results that cannot travel --------------------------------------------------------------------------------------


def test_F55_a_result_that_cannot_be_pickled(directory: Path) -> None:
    write_record(
        directory, 1, type="TypeError", message="cannot pickle lock", value_type="_thread.lock", value_repr="<lock>"
    )
    error = make_exception(stopped(Reason.RESULT_UNSERIALISABLE, "x", rank=1), directory, RUN, None)
    assert isinstance(error, ResultNotSerializable)
    assert error.message == golden("client.outcome.rank-finished-but")


def test_F52_a_result_that_is_too_large(directory: Path) -> None:
    write_record(directory, 1, size=17_200_000_000, limit=16_000_000_000)
    error = make_exception(stopped(Reason.RESULT_TOO_LARGE, "x", rank=1), directory, RUN, None)
    assert isinstance(error, ResultTooLarge)
    assert error.message == golden("client.outcome.rank-finished-but-result")


def test_F28_a_result_that_could_not_be_written(directory: Path) -> None:
    detail = "OSError: [Errno 28] No space left on device"
    error = make_exception(stopped(Reason.RESULT_STORAGE, detail, rank=1), directory, RUN, None)
    assert type(error) is RunError
    assert error.message == golden("client.outcome.rank-finished-but-result-2", detail=detail)


@pytest.mark.parametrize("reason", [Reason.RESULT_UNSERIALISABLE, Reason.RESULT_TOO_LARGE])
@pytest.mark.parametrize("record", [None, "{", "[]"], ids=["none", "half", "list"])
def test_F28_without_the_record_the_message_still_makes_sense(
    directory: Path, reason: Reason, record: str | None
) -> None:
    """The disk of the rank was full: what its last event carried is all there is."""
    if record is not None:
        (directory / "failures" / "1.json").write_text(record)
    error = make_exception(stopped(reason, "TypeError: cannot pickle lock", rank=1), directory, RUN, None)
    assert isinstance(error, RunError)
    assert golden("client.outcome.rank-finished-but-result-3") in error.message
    assert "None" not in error.message and "0 B" not in error.message


# --- what ranks raised ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "named"),
    [(("1.stdout", "1.stderr"), "logs/1.stderr"), (("1.stdout",), "logs/1.stdout"), ((), "logs")],
    ids=["both", "stdout", "nothing"],
)
def test_F06_the_users_exception_is_raised_as_its_own_type(
    directory: Path, written: tuple[str, ...], named: str
) -> None:
    (directory / "logs").mkdir(exist_ok=True)
    for name in written:
        (directory / "logs" / name).write_text("x")
    write_raised(directory, 1, KeyError("lr"))
    error = make_exception(stopped(Reason.RANK_RAISED, "KeyError: 'lr'", rank=1), directory, RUN, None)
    assert (type(error), error.args) == (KeyError, ("lr",))
    assert error.__notes__ == [
        golden("client.outcome.rank-host-run", gethostname=socket.gethostname(), RUN=RUN, value=directory / named)
    ]


@pytest.mark.parametrize(
    ("raised", "reason", "message"),
    [
        (SystemExit(3), Reason.SYSTEM_EXIT, "rank 0 called sys.exit before it returned a result: exit code 3"),
        (KeyboardInterrupt(), Reason.RANK_INTERRUPTED, "rank 0 raised KeyboardInterrupt"),
    ],
    ids=["exit", "interrupt"],
)
def test_F07_what_would_end_the_caller_is_an_error_of_ours(
    directory: Path, raised: BaseException, reason: Reason, message: str
) -> None:
    write_raised(directory, 0, raised)
    error = make_exception(stopped(reason, "x", rank=0), directory, RUN, None)
    assert type(error) is RunError
    assert (error.message, error.rank, error.reason) == (message, 0, reason.value)


def test_F28_an_exception_without_a_record_is_told_by_its_event(directory: Path) -> None:
    error = make_exception(stopped(Reason.RANK_RAISED, "ValueError: no", rank=2), directory, RUN, None)
    assert isinstance(error, RemoteError)
    assert (error.message, error.rank, error.reason) == (
        golden("client.outcome.rank-raised-valueerror"),
        2,
        "rank_raised",
    )


# --- consequences and evidence ---------------------------------------------------------------------------------------


def peers(count: int) -> tuple[Failure, ...]:
    return tuple(
        Failure(rank=rank, reason=Reason.RANK_RAISED, at_ns=5, detail=f"RuntimeError: peer {rank}")
        for rank in range(1, count + 1)
    )


def test_consequences_are_notes(directory: Path) -> None:
    consequences = (
        *peers(1),
        Failure(rank=None, reason=Reason.RUNTIME_LOST, at_ns=6),
        Failure(rank=2, reason=Reason.RANK_RAISED, at_ns=6, detail="x" * 1000),
    )
    error = make_exception(
        stopped(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=0, consequences=consequences), directory, RUN, None
    )
    assert error.__notes__ == [
        golden("client.outcome.consequence-rank-runtimeerror"),
        golden("client.outcome.consequence-attempt", OWNED=OWNED),
        "consequence: " + ("rank 2: " + "x" * 1000)[:300],
    ]


def test_many_consequences_are_counted(directory: Path) -> None:
    ending = stopped(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=0, consequences=peers(20))
    notes = make_exception(ending, directory, RUN, None).__notes__
    assert len(notes) == 9
    assert notes[7:] == [
        golden("client.outcome.consequence-rank-runtimeerror-peer"),
        golden("client.outcome.consequence-12-more"),
    ]
    assert ending_text(ending, directory, RUN, None).splitlines()[-9:] == notes, "as it is read later"


def test_a_cancelled_run_has_no_consequences(directory: Path) -> None:
    error = make_exception(stopped(Reason.CANCELLED, cause=False, consequences=peers(2)), directory, RUN, None)
    assert not hasattr(error, "__notes__")


def test_F01_the_stack_and_the_last_output_of_a_crashed_rank(directory: Path) -> None:
    inside = os.path.dirname(os.path.abspath(failure.__file__))
    (directory / "failures" / "0.stack").write_text(
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x1 (most recent call first):\n"
        '  File "<string>", line 2 in made_by_exec\n'
        '  File "<string>", line 9 in <module>\n'
        '  File "/home/me/train.py", line 7 in step\n'
        f'  File "{inside}/rank.py", line 120 in execute\n'
        '  File "<string>", line 6 in <module>\n'
        "\nExtension modules: numpy, torch (total: 2)\n"
    )
    ending = stopped(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=0, log_tail="epoch 1\nepoch 2")
    error = make_exception(ending, directory, RUN, None)
    assert error.__notes__ == [
        golden("client.outcome.python-stack-rank"),
        golden("client.outcome.last-output-rank"),
    ]
    assert isinstance(error, RankCrashed) and error.log_tail == "epoch 1\nepoch 2"


def test_the_last_output_in_a_note_is_safe_for_a_terminal(directory: Path) -> None:
    tail = "\x1b[31mred\n\x1b]52;c;x\x07clip\u202e"
    ending = stopped(Reason.RANK_SIGNAL, "ended by SIGSEGV", rank=0, log_tail=tail)
    error = make_exception(ending, directory, RUN, None)
    assert error.__notes__ == [golden("client.outcome.last-output-rank-31mred")]
    assert isinstance(error, RankCrashed) and error.log_tail == tail


def test_F04_a_hang_names_who_waits_and_who_is_elsewhere(directory: Path) -> None:
    told = "no output for 10 min 00 s, and ranks 0, 2 wait in train.py:30 train: rank 1 is elsewhere, in load.py:4 load"
    hang = Hang(
        waiting=(0, 2),
        elsewhere=(1,),
        stacks={1: '  File "/home/me/load.py", line 4 in load', 2: '  File "/home/me/train.py", line 30 in train'},
        file="hang-1.txt",
    )
    ending = msgspec.structs.replace(stopped(Reason.COLLECTIVE_HANG, told, consequences=peers(1)), hang=hang)
    over_the_wire = msgspec.json.decode(msgspec.json.encode(ending), type=Stopped)
    error = make_exception(over_the_wire, directory, RUN, None)
    assert isinstance(error, CollectiveHang)
    assert str(error) == golden("client.outcome.hint-python-stacks", told=told, directory=directory)
    assert (error.ranks_waiting, error.ranks_elsewhere) == ([0, 2], [1])
    assert (error.run_id, error.rank, error.reason) == (RUN, None, "collective_hang")
    assert error.__notes__ == [
        golden("client.outcome.rank-here-most"),
        golden("client.outcome.rank-waits-here"),
        golden("client.outcome.consequence-rank-runtimeerror"),
    ]
    assert pickle.loads(pickle.dumps(error)).ranks_waiting == [0, 2]


def test_F45_a_lost_cluster_says_what_died_where_ray_wrote_and_what_came_of_it(directory: Path) -> None:
    told = "Ray on node gpu7 is gone: its gcs_server ended while the run needed it"
    write_record(
        directory, 0, notes=["the function then raised RayError: no head"], traceback="Traceback \x1b]0;x\x07:\n  x\n"
    )
    ending = stopped(Reason.ENGINE_HEAD_LOST, told, rank=0)
    error = make_exception(ending, directory, RUN, None)
    assert isinstance(error, EngineHeadLost)
    assert str(error) == golden(
        "client.outcome.hint-ray-wrote", told=told, directory=directory, logs_hint=logs_hint(directory, 0)
    )
    assert (error.rank, error.reason, error.code) == (0, "engine_head_lost", "engine_head_lost")
    assert error.__notes__ == [golden("client.outcome.function-then-raised"), "Traceback :\n  x"]
    elsewhere = make_exception(ending, directory, RUN, None, Origin(node="gpu7"))
    assert isinstance(elsewhere, EngineHeadLost)
    logs = f"logs: `sgpu logs {RUN} --rank 0`"
    assert elsewhere.hint == golden("client.outcome.ray-wrote-node", logs=logs)
    assert ending_text(ending, directory, RUN, None).splitlines()[0] == told


def test_F45_a_cluster_that_memory_ended_says_so_and_what_died(directory: Path) -> None:
    lost = "Ray on node gpu7 is gone: its raylet ended while the run needed it"
    write_record(directory, 0, kind="engine_head_lost", message=lost, notes=["the function then raised RayError: x"])
    detail = "killed by the kernel because host memory ran out (limit 4.0 GB, peak 4.0 GB)"
    error = make_exception(stopped(Reason.HOST_OOM, detail, rank=0), directory, RUN, None)
    assert isinstance(error, OutOfMemory)
    assert error.message == golden("client.outcome.process-run-ray", detail=detail)
    assert error.__notes__ == [lost, golden("client.outcome.function-then-raised-rayerror")]


def test_F45_a_cluster_that_never_came_up_is_told_in_the_nodes_words(directory: Path) -> None:
    told = "Ray could not be started on node gpu7: no room"
    write_record(directory, 0, kind="start_failed", message=told, notes=[])
    error = make_exception(stopped(Reason.START_FAILED, told, rank=0), directory, RUN, None)
    assert isinstance(error, RunError)
    assert (error.message, error.reason) == (told, "start_failed")
    assert not hasattr(error, "__notes__")


# --- results ---------------------------------------------------------------------------------------------------------


def test_a_result_is_loaded(directory: Path) -> None:
    payload.dump({"loss": 0.5}, str(directory / "results" / "2.pkl"))
    assert load_result(directory, 2, RUN) == {"loss": 0.5}


class Stubborn:
    """Travels, and cannot be made again."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("not a number",))


def test_F57_a_result_that_cannot_be_loaded_here_stays_where_it_is(directory: Path) -> None:
    path = directory / "results" / "2.pkl"
    payload.dump(Stubborn(), str(path))
    with pytest.raises(ResultUnavailableHere) as caught:
        load_result(directory, 2, RUN)
    assert str(caught.value) == golden("client.outcome.rank-returned-value", path=path)
    assert (caught.value.run_id, caught.value.rank, caught.value.reason) == (RUN, 2, "completed")
    assert path.exists()


def test_a_result_that_is_gone(directory: Path) -> None:
    with pytest.raises(ResultUnavailableHere, match=golden("client.outcome.rank-returned-value-but")):
        load_result(directory, 5, RUN)


class EndsReader:
    """Pickles, and ends the process that loads it."""

    def __reduce__(self) -> str | tuple[object, ...]:
        return sys.exit, (5,)


def test_23A7_a_result_whose_loading_would_end_the_caller_is_an_error_of_ours(directory: Path) -> None:
    payload.dump(EndsReader(), str(directory / "results" / "0.pkl"))
    with pytest.raises(ResultUnavailableHere, match="SystemExit: 5"):
        load_result(directory, 0, RUN)
