"""Any process may be killed at any time: who notices, what goes on, and that nothing is left."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu import Run, attach, distributed
from serverless_gpu.errors import NodeLost, RankCrashed, RuntimeLost
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Reason, State
from serverless_gpu.model.lifecycle.run_lifecycle import LOST
from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.observe import (
    Process,
    agent,
    announced,
    ended,
    held_locks,
    nothing_of_a_run,
    processes_of,
    run_directories,
    start_script,
    supervisor,
    wait_for,
    zygote,
)
from tests.support.local.ranks import CHILDREN, leave_children, stay
from tests.support.paths import REPOSITORY

ROOT = str(REPOSITORY)


class Going:
    """A run of two ranks that stay until they are told to go."""

    def __init__(self, where: str) -> None:
        self.where = Path(where)
        self.run: Run[int] = distributed(gpus=2, quiet=True)(stay).submit(where)
        first, self.stem_pid = announced(self.where, "rank0")
        self.ranks = [first, announced(self.where, "rank1")[0]]
        wait_for(lambda: self.run.status() == "RUNNING", "it runs")

    def go(self) -> None:
        """Let the ranks return."""
        (self.where / "go").touch()


@pytest.fixture
def going(own: Path, where: str) -> Iterator[Going]:
    """Yield a run that is going on."""
    yield Going(where)


# --- the caller -------------------------------------------------------------------------------------------------------


def test_a_killed_caller_is_not_missed(own: Path, where: str) -> None:
    path = Path(where, "caller.py")
    path.write_text(
        "import sys\nfrom serverless_gpu import distributed\nfrom tests.support.local.ranks import stay\n"
        "distributed(gpus=2)(stay).distributed(sys.argv[1])\n"
    )
    environ = {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))}
    caller = start_script(path, where, environ=environ)
    rank, _ = announced(Path(where), "rank1")
    os.killpg(caller.pid, signal.SIGKILL)
    assert ended(caller)[0] == -signal.SIGKILL
    run = attach(run_directories(own)[0])
    wait_for(lambda: run.status() == "RUNNING", "it goes on, and its supervisor knows that it runs")
    assert rank.alive()
    Path(where, "go").touch()
    assert run.results(timeout=50) == [0, 1]
    assert run.receipt(timeout=50).state == "SUCCEEDED"


# --- the agent --------------------------------------------------------------------------------------------------------


def test_a_killed_agent_is_replaced_and_the_new_one_adopts(own: Path, going: Going) -> None:
    agent(own).kill()
    assert all(rank.alive() for rank in going.ranks) and going.run.status() == "RUNNING"
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2], "the next call starts a new agent"
    status = agent_status(own)
    assert status is not None and any(attempt.run_id == going.run.id and attempt.adopted for attempt in status.attempts)
    assert attach(going.run.id).status() == "RUNNING"
    blocked = distributed(gpus=8, quiet=True)(len).submit("ab")
    assert not blocked.wait(0.3), "its GPUs are still taken"
    going.go()
    assert going.run.results(timeout=50) == [0, 1]
    assert blocked.results(timeout=50) == [2] * 8
    wait_for(lambda: nothing_of_a_run(own), "the adopted run is gone, too")


def test_an_adopted_run_whose_supervisor_is_killed_gets_its_record(own: Path, going: Going) -> None:
    keeper = supervisor(own, going.run.id)
    agent(own).kill()
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    keeper.kill()
    with pytest.raises(NodeLost):
        going.run.results(timeout=50)
    wait_for(lambda: (going.run.directory / "stopped.json").exists(), "the new agent writes the record")
    assert attach(going.run.id).status() == "LOST"


def test_a_killed_agent_takes_its_warm_processes_with_it(own: Path) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    warm = zygote(own)
    agent(own).kill()
    warm.wait_gone()
    wait_for(lambda: processes_of(own) == [], "nothing stands by any more")


def test_runs_that_wait_for_gpus_survive_the_agent(own: Path, where: str) -> None:
    holder = distributed(gpus=8, quiet=True)(stay).submit(where)
    announced(Path(where), "rank7")
    status = agent_status(own)
    assert status is not None
    waiting = [distributed(gpus=1, quiet=True)(len).submit("abc") for _ in range(2)]
    wait_for(lambda: sum(name.endswith(".ticket") for name in held_locks(own)) == 2, "both stand in line")
    wait_for(lambda: all(has_stem(own, run) for run in waiting), "both have what they need to start")
    agent(own).kill()
    Path(where, "go").touch()
    assert [run.results(timeout=50) for run in waiting] == [[3], [3]]
    assert holder.results(timeout=50) == list(range(8))


def has_stem(home: Path, run: Run[int]) -> bool:
    """Return whether the supervisor of a run holds four sockets: agent, caller, its own, and the stem's."""
    directory = Path(f"/proc/{supervisor(home, run.id).pid}/fd")
    sockets = 0
    for fd in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since: it looks at locks all the time
            sockets += os.readlink(fd).startswith("socket:")
    return sockets >= 4


def test_runs_in_a_killed_agents_own_queue_are_sent_to_the_next_one(own: Path, where: str) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    process = agent(own)
    process.send(signal.SIGSTOP)  # the launch lies in its socket, unread
    found: list[list[int]] = []
    caller = threading.Thread(target=lambda: found.append(distributed(gpus=1, quiet=True)(len).distributed("abc")))
    caller.start()
    wait_for(caller.is_alive, "somebody calls")
    process.kill()
    caller.join(60)
    assert found == [[3]]


def test_two_agents_started_at_once_end_up_as_one(own: Path, tmp_path: Path) -> None:
    path = tmp_path / "call.py"
    path.write_text(
        "from serverless_gpu import distributed\nimport os\n"
        "print(distributed(gpus=1, quiet=True)(os.getppid).distributed())\n"
    )
    callers = [start_script(path) for _ in range(4)]
    for caller in callers:
        code, _, err = ended(caller)
        assert code == 0, err
    # One that came too late may still be ending.
    wait_for(
        lambda: sum("serverless_gpu.node.agent.agent" in line for line in processes_of(own)) == 1, "there is one agent"
    )
    status = agent_status(own)
    assert status is not None and len(status.zygotes) == 1


def test_a_stale_socket_of_an_agent_does_not_matter(own: Path) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    for _ in range(3):
        agent(own).kill()
        assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]


# --- supervisor, zygote, stem, rank -----------------------------------------------------------------------------------


def test_22A8_a_killed_supervisor_ends_its_ranks_within_a_second_and_is_paid(own: Path, where: str) -> None:
    def train(where: str, rank: int = -1) -> int:
        if rank == 0:
            leave_children(where)
        return stay(where)

    run = distributed(gpus=2, quiet=True)(train).submit(where)
    ranks = [announced(Path(where), name)[0] for name in ("rank0", "rank1", *CHILDREN)]
    keeper = supervisor(own, run.id)
    keeper.kill()
    killed = time.monotonic()
    for rank in ranks:
        rank.wait_gone()
    assert time.monotonic() - killed < 4, "a second is promised; the machine may be busy, and a turn would be 5 s"
    with pytest.raises(NodeLost) as caught:
        run.results(timeout=50)
    assert caught.value.reason == "supervisor_killed" and caught.value.run_id == run.id
    assert run.status() == "LOST"
    receipt = run.receipt(timeout=50)
    assert receipt.gpu_ms > 0 and receipt.bill is not None and receipt.bill.billed_ms == receipt.gpu_ms
    wait_for(lambda: held_locks(own) == [], "its GPUs are free again")
    assert distributed(quiet=True)(len).distributed("ab") == [2] * 8
    wait_for(lambda: (run.directory / "stopped.json").exists(), "the agent writes the record")
    with pytest.raises(NodeLost):
        attach(run.id).results()


def test_a_killed_zygote_costs_the_next_run_its_warm_start_only(own: Path, going: Going) -> None:
    zygote(own).kill()
    assert all(rank.alive() for rank in going.ranks)
    run = distributed(gpus=1, quiet=True)(len).submit("ab")
    assert run.results(timeout=50) == [2]
    receipt = run.receipt(timeout=50)
    assert not receipt.warm and "zygote" in receipt.warm_reason and "died" in receipt.warm_reason
    going.go()
    assert going.run.results(timeout=50) == [0, 1]
    assert going.run.receipt(timeout=50).state == "SUCCEEDED"


def test_23A8_a_killed_stem_ends_the_run_and_its_ranks_and_all_say_the_same(own: Path, going: Going) -> None:
    Process(going.stem_pid).kill()
    with pytest.raises(RuntimeLost) as caught:
        going.run.results(timeout=50)
    assert (caught.value.code, caught.value.reason) == ("runtime_lost", "runtime_lost")
    assert "retries=1" in caught.value.hint
    assert MEANINGS[Reason.RUNTIME_LOST].state is State.FAILED and Reason.RUNTIME_LOST not in LOST
    for rank in going.ranks:
        rank.wait_gone()
    assert going.run.receipt(timeout=50).state == "FAILED"
    assert distributed(quiet=True)(len).distributed("ab") == [2] * 8


def test_a_rank_killed_from_outside_is_told_with_its_signal(own: Path, going: Going) -> None:
    going.ranks[1].kill()
    with pytest.raises(RankCrashed, match=re.escape(golden("local.kills.rank-ended-sigkill"))):
        going.run.results(timeout=50)
    going.ranks[0].wait_gone()


def test_what_stands_by_for_supervisors_is_replaced_when_it_is_killed(own: Path) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    for _ in range(2):
        for line in wait_for(lambda: standing_by(own), "something stands by"):
            Process(int(line.partition(":")[0])).kill()
        assert distributed(gpus=1, quiet=True)(len).distributed("abc") == [3]


def standing_by(home: Path) -> list[str]:
    """Return everything of a home but its agent."""
    return [line for line in processes_of(home) if "node.agent" not in line]


def test_a_stem_killed_while_it_stands_by_is_replaced(own: Path) -> None:
    assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]
    warm = zygote(own)
    for _ in range(2):
        for pid in wait_for(lambda: children(warm.pid), "a stem stands by"):
            Process(pid).kill()
        assert distributed(gpus=1, quiet=True)(len).distributed("ab") == [2]


def children(pid: int) -> list[int]:
    """Return the children of a process's main thread."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- everything at once -----------------------------------------------------------------------------------------------


def test_after_all_that_nothing_is_left(own: Path, going: Going) -> None:
    keeper = supervisor(own, going.run.id)
    processes = [keeper, agent(own), zygote(own), Process(going.stem_pid), *going.ranks]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):  # it has died of the one before
            process.send(signal.SIGKILL)
    for process in processes:
        process.wait_gone()
    wait_for(lambda: processes_of(own) == [] and held_locks(own) == [], "all is gone")
    with pytest.raises(NodeLost):
        going.run.results(timeout=50)
    assert distributed(quiet=True)(len).distributed("ab") == [2] * 8
    done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(going.stem_pid)], capture_output=True, check=False)
    assert done.stdout == b""


@pytest.mark.usefixtures("own")
def test_23A9_shared_memory_of_a_killed_rank_is_removed_and_files_of_the_user_stay() -> None:
    mine = Path(f"/dev/shm/mine-{os.getpid()}")

    @distributed(gpus=1, quiet=True)
    def die(own: str, path: str) -> None:
        segment = Path("/dev/shm") / own
        segment.write_bytes(b"x" * 4096)
        Path(path).write_bytes(b"theirs")
        with segment.open("r+b") as file:
            held = mmap.mmap(file.fileno(), 0)
        if os.fork() == 0:  # as a worker that has it, too
            while held:
                time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)

    name = f"psm_{os.urandom(4).hex()}"
    try:
        run = die.submit(name, str(mine))
        with pytest.raises(RankCrashed):
            run.results(timeout=50)
        run.receipt(timeout=50)
        assert not (Path("/dev/shm") / name).exists()
        assert mine.read_bytes() == b"theirs"
    finally:
        mine.unlink(missing_ok=True)
        (Path("/dev/shm") / name).unlink(missing_ok=True)
