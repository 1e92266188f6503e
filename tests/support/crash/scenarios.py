"""For each place of `faults.PLACES`, what is done so that somebody passes it and dies there, and what must come of it.

arm the place ─▶ play ─▶ a process has died there ─▶ it is started again ─▶ what was asked for is there, once
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa
from blake3 import blake3

from serverless_gpu import Run, distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import RunCancelled, RunError
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import start_stop
from serverless_gpu.server.db import tables
from serverless_gpu.server.operations.backup import verify
from serverless_gpu.server.records import audit
from serverless_gpu.wire.access import SecretRequest, SecretView
from serverless_gpu.wire.blobs import DigestList
from serverless_gpu.wire.runs import RunView
from serverless_gpu.wire.server_status import DrainRequest, DrainView
from tests.support.crash.machine import WAIT_S, Machine
from tests.support.local.observe import wait_for

LARGE_BYTES = 100_000
"""Of a result that does not travel inside of a report."""


class Scenario(NamedTuple):
    """How a place is passed.

    Attributes:
        play: does it, and asserts what came of it.
        of_node: whether it is a process of the node that dies; the server starts that again by itself.
        alone: whether it needs a machine of its own, whose server was never started.
    """

    play: Callable[[Machine, str, Path], None]
    of_node: bool = False
    alone: bool = False


@distributed(gpus=1, gpu_type="H100", remote=True, quiet=True)
def work(directory: str, size: int) -> bytes:
    with open(f"{directory}/began", "a") as file:
        file.write(f"{os.getpid()}\n")
    print("it is said")
    while size < 0 and not os.path.exists(f"{directory}/go"):
        os.sched_yield()
    return b"x" * abs(size)


@distributed(gpus=1, gpu_type="H100", remote=True, quiet=True, secrets=["ONE", "TWO"])
def confided(directory: str) -> dict[str, str]:
    with open(f"{directory}/began", "a") as file:
        file.write(f"{os.getpid()}\n")
    return {name: rt.secret(name) for name in ("ONE", "TWO")}


def returns(size: int = 1) -> Callable[[Machine, str, Path], None]:
    """Return a scenario in which a call returns what it returns, having run once."""

    def play(machine: Machine, place: str, where: Path) -> None:
        with dying(machine, place, where, size) as called:
            pass
        assert called.result(WAIT_S) == [b"x" * size]
        assert executions(where) == 1

    return play


def loses_its_supervisor(machine: Machine, place: str, where: Path) -> None:
    """User code may have begun, so the run ends, and is not repeated."""
    with dying(machine, place, where, 1) as called:
        pass
    error = called.exception(WAIT_S)
    assert isinstance(error, RunError) and error.reason == "supervisor_killed", error
    assert executions(where) <= 1


def is_stopped(machine: Machine, place: str, where: Path) -> None:
    """A stop that was not answered is asked for again, and has come to pass once."""
    with ThreadPoolExecutor(1) as pool:
        run = submitted(machine, where, -1)
        wait_for(lambda: executions(where) == 1, "it has begun", limit_s=WAIT_S)
        machine.arm(place)
        cancelling = pool.submit(run.cancel)
        machine.wait_hit(place)
        machine.recover()
        cancelling.result(WAIT_S)
        with contextlib.suppress(RunCancelled):
            run.results()
            raise AssertionError("it was cancelled")
    stops = [row for row in rows(machine, tables.audit) if row["action"] == "run.stop" and row["subject"] == run.id]
    assert len(stops) == 1


def says_hello(machine: Machine, place: str, where: Path) -> None:
    """A node that was written down and not told so says hello again, and is one node."""
    machine.arm(place)
    start_stop.stop_all(Home(machine.home))
    machine.wait_hit(place)
    machine.recover()
    assert submitted(machine, where, 1).results() == [b"x"]
    nodes = rows(machine, tables.nodes)
    assert len(nodes) == len({node["name"] for node in nodes})


def sends_a_part(machine: Machine, place: str, where: Path) -> None:
    """A part is there whole, or is not there; sending it again is all it takes."""
    part = os.urandom(LARGE_BYTES)
    digest = blake3(part).hexdigest()
    patient = machine.connection(patience_s=WAIT_S)
    machine.arm(place)
    with ThreadPoolExecutor(1) as pool, contextlib.closing(patient):
        putting = pool.submit(patient.put, f"/blobs/{digest}", part)
        machine.wait_hit(place)
        machine.recover()
        putting.result(WAIT_S)
        asked = DigestList(digests=(digest,))
        assert patient.ask("POST", "/blobs/missing", asked, answer=DigestList).digests == ()
    found = list((machine.home / "server" / "blobs").rglob(digest))
    assert [path.read_bytes() for path in found] == [part]


def collects(machine: Machine, place: str, where: Path) -> None:
    """What is referred to stays, whatever the collector was killed in; what is not goes in the end."""
    kept = submitted(machine, where, LARGE_BYTES)
    assert kept.results() == [b"x" * LARGE_BYTES]
    part = os.urandom(LARGE_BYTES)
    with contextlib.closing(machine.connection()) as connection:
        connection.put(f"/blobs/{blake3(part).hexdigest()}", part)
    machine.stop()
    often = (
        "environments.FIRST_S=0.1",
        "environments.EVERY_S=0.1",
        "environments.GRACE_S=0",
    )
    machine.arm(place)
    machine.spawn(*often)
    machine.line()  # nothing, where it dies before it has said that it is ready
    machine.wait_hit(place)
    machine.recover(*often)
    blobs = machine.home / "server" / "blobs"
    wait_for(lambda: not found_below(blobs, blake3(part).hexdigest()), "it is gone", limit_s=WAIT_S)
    machine.stop()
    machine.start()
    with contextlib.closing(machine.connection()) as connection:
        assert connection.ask("GET", f"/runs/{kept.id}", answer=RunView).state == "SUCCEEDED"
        assert len(connection.get(f"/runs/{kept.id}/files/results/0.pkl")) > LARGE_BYTES


def expires(machine: Machine, place: str, where: Path) -> None:
    """Output that its run has left behind goes the next time; the other runs stay."""
    run = submitted(machine, where, 1)
    assert run.results() == [b"x"]
    output = machine.home / "server" / "logs" / run.id
    wait_for(lambda: output.exists() and settled(machine, run), "it is settled", limit_s=WAIT_S)
    machine.stop()
    soon = ("runs.retention.FIRST_S=0.1", "runs.retention.EVERY_S=0.1", "Settings.retention_s=0")
    machine.arm(place)
    machine.spawn(*soon)
    machine.line()  # nothing, where it dies before it has said that it is ready
    machine.wait_hit(place)
    machine.recover(*soon)
    wait_for(lambda: not output.exists(), "the output is gone", limit_s=WAIT_S)
    machine.stop()
    machine.start()
    machine.acknowledged -= {row["subject"] for row in rows(machine, tables.audit) if row["action"] == "run.expire"}
    expired = [row for row in rows(machine, tables.audit) if row["action"] == "run.expire" and row["subject"] == run.id]
    assert len(expired) == 1 and run.id not in {row["id"] for row in rows(machine, tables.runs)}


def starts_first(machine: Machine, place: str, where: Path) -> None:
    """A server killed in its first start starts like one that never did, and its files are known to its database."""
    machine.arm(place)
    machine.spawn("node=false")
    assert machine.line() == ""
    machine.wait_hit(place)
    machine.recover("node=false")
    for token in ("token", "node.token"):
        with contextlib.closing(machine.connection(token)) as connection:
            assert connection.get("/whoami")
    wait_for(lambda: not list((machine.home / "server").glob(".*")), "no file stays that nobody asks for")


def is_charged(machine: Machine, place: str, where: Path) -> None:
    """What was used is in the ledger once, whoever was killed while it was written."""
    machine.arm(place)
    run = submitted(machine, where, 1)
    machine.wait_hit(place)
    machine.recover()
    assert run.results(WAIT_S) == [b"x"] and executions(where) == 1
    wait_for(lambda: settled(machine, run) and not uncharged(machine), "it is charged", limit_s=WAIT_S)
    own = [row for row in rows(machine, tables.charges) if row["run_id"] == run.id]
    assert [(row["kind"], row["provisional"]) for row in own] == [("original", False)]


def is_chained(machine: Machine, place: str, where: Path) -> None:
    """Rows of the audit are in its chain once, and it is whole."""
    with dying(machine, place, where, 1) as called:
        pass
    assert called.result(WAIT_S) == [b"x"]
    assert executions(where) == 1

    def look(connection: sa.Connection) -> tuple[list[ChainedEntry], set[int]]:  # both of one moment: more may come
        there = set(connection.execute(sa.select(tables.audit.c.seq)).scalars())
        return list(audit.links(connection, audit.AuditFilter(limit=100_000))), there

    def is_whole() -> bool:
        links, there = machine.read(look)
        assert follow(links, after=ChainHead())[1] == ""
        return {link.seq for link in links} == there and len(links) == len(there)

    wait_for(is_whole, "all is chained, once", WAIT_S)


def is_backed_up(machine: Machine, place: str, where: Path) -> None:
    """A backup that was killed is none; the next one is whole, and nothing of the first is left."""
    run = submitted(machine, where, 1)
    assert run.results() == [b"x"]
    backups = where / "backups"
    machine.arm(place)
    assert machine.command("backup", str(backups)) == -signal.SIGKILL
    machine.wait_hit(place)
    assert not list(backups.glob("[!.]*"))
    assert machine.command("backup", str(backups)) == 0
    (made,) = [path for path in backups.iterdir() if path.name != ".lock"]  # and nothing of the other
    assert {"server/key", "server/token"} < verify(made).files.keys()
    assert executions(where) == 1


def is_restored(machine: Machine, place: str, where: Path) -> None:
    """A home has all of its server, or none."""
    machine.start("node=false")
    backup = backed_up(machine, where)
    machine.stop()
    server = machine.home / "server"
    server.rename(machine.home / "lost")
    machine.arm(place)
    assert machine.command("restore", str(backup)) == -signal.SIGKILL
    machine.wait_hit(place)
    assert not server.exists()
    assert machine.command("restore", str(backup)) == 0
    assert not list(machine.home.glob(".server-*"))
    machine.start("node=false")
    with contextlib.closing(machine.connection()) as connection:
        assert connection.get("/whoami")


def starts_restored(machine: Machine, place: str, where: Path) -> None:
    """A run that waits in the backup, and ran since, runs once."""
    machine.start()
    drain(machine, on=True)
    run = submitted(machine, where, 1)
    backup = backed_up(machine, where)
    of_then = machine.database
    if not of_then.startswith("sqlite"):  # that is not in the backup
        machine.stop()
        of_then = machine.copied_database()
        machine.start()
    drain(machine, on=False)
    assert run.results(WAIT_S) == [b"x"] and executions(where) == 1
    machine.stop()
    (machine.home / "server").rename(machine.home / "lost")
    machine.database = of_then
    assert machine.command("restore", str(backup)) == 0
    machine.arm(place)
    machine.spawn()
    assert machine.line() == ""
    machine.wait_hit(place)
    machine.recover()
    drain(machine, on=False)
    with contextlib.closing(machine.connection()) as connection:
        assert connection.ask("GET", f"/runs/{run.id}", answer=RunView).reason == "server_restored"
    assert executions(where) == 1


def has_secrets(machine: Machine, place: str, where: Path) -> None:
    """A run has its secrets, and no file of them is left, whoever was killed while they were written."""
    values = {name: f"{name} {os.urandom(8).hex()}" for name in ("ONE", "TWO")}
    with contextlib.closing(machine.connection()) as connection:
        for name, value in values.items():
            connection.ask("PUT", f"/secrets/{name}", SecretRequest(value=value.encode()), answer=SecretView)
    machine.arm(place)
    run = confided.submit(str(where))
    machine.acknowledged.add(run.id)
    machine.wait_hit(place)
    assert run.results(WAIT_S) == [values]
    assert executions(where) == 1
    wait_for(lambda: not secret_files(machine, values), "its secrets are gone", limit_s=WAIT_S)


def renews(machine: Machine, place: str, where: Path) -> None:
    """A run goes on, and is told of, whichever token its directory had."""
    run = submitted(machine, where, -1)
    wait_for(lambda: executions(where) == 1, "it has begun", limit_s=WAIT_S)
    machine.arm(place)
    machine.wait_hit(place)
    (where / "go").touch()
    assert run.results(WAIT_S) == [b"x"] and executions(where) == 1
    wait_for(lambda: settled(machine, run), "it is settled", limit_s=WAIT_S)


# --- what they are made of ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def dying(machine: Machine, place: str, where: Path, size: int) -> Iterator[Future[list[bytes]]]:
    """Call while a place is armed; whoever died there has been started again at the end."""
    machine.arm(place)
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(lambda: submitted(machine, where, size).results())
        yield called
        machine.wait_hit(place)
        if not SCENARIOS[place].of_node:
            machine.recover()


def submitted(machine: Machine, where: Path, size: int) -> Run[bytes]:
    """Submit a run; it is acknowledged when this returns."""
    run = work.submit(str(where), size)
    machine.acknowledged.add(run.id)
    return run


def executions(where: Path) -> int:
    """Return how often user code began."""
    path = where / "began"
    return len(path.read_text().splitlines()) if path.exists() else 0


def found_below(directory: Path, name: str) -> list[Path]:
    """Return the files of a name below a directory from which others are deleted meanwhile."""
    return [Path(place, name) for place, _, files in os.walk(directory) if name in files]


def rows(machine: Machine, table: sa.Table) -> list[sa.RowMapping]:
    """Return the rows of a table that every scenario has."""
    return machine.read(lambda connection: list(connection.execute(sa.select(table)).mappings()))


def drain(machine: Machine, *, on: bool) -> None:
    """Have nothing new started, or have it started again."""
    with contextlib.closing(machine.connection()) as connection:
        connection.ask("PUT", "/drain", DrainRequest(on=on), answer=DrainView)


def backed_up(machine: Machine, where: Path) -> Path:
    """Return a backup of the server as it is."""
    assert machine.command("backup", str(where / "backups")) == 0
    (backup,) = (where / "backups").glob("*Z")
    return backup


def secret_files(machine: Machine, values: dict[str, str]) -> list[Path]:
    """Return the files on this machine that have one of some values: in memory, or below the home."""
    written = {value.encode() for value in values.values()}
    found = []
    for path in [*Path("/dev/shm").glob("sgpu-secrets-*/*"), *machine.home.glob("runs/*/*/secrets/*")]:
        with contextlib.suppress(OSError):  # others' go meanwhile
            found += [path] if path.read_bytes() in written else []
    return found


def settled(machine: Machine, run: Run[bytes]) -> bool:
    """Return whether nothing more comes of a run."""
    return any(row["id"] == run.id and row["settled_ns"] is not None for row in rows(machine, tables.runs))


def uncharged(machine: Machine) -> bool:
    """Return whether an attempt is to be charged."""
    return any(row["uncharged"] for row in rows(machine, tables.crews))


OF_GANGS = (
    "after_offer_before_answer",
    "after_choose_before_commit",
    "after_chosen_before_answer",
    "after_called_off_before_told",
    "after_decided_before_told",
)
ELSEWHERE = {
    "after_reserve_is_given_back": "test_full_database.py",
    "between_rotation_steps": "../../support/crash/rotation.py",
} | dict.fromkeys(OF_GANGS, "test_gangs.py")
"""Places that are passed on a full disk only, while no server runs, or where a run has several nodes."""
SCENARIOS = {
    "in_migration": Scenario(starts_first, alone=True),
    "before_file_is_named": Scenario(starts_first, alone=True),
    "after_token_file_before_row": Scenario(starts_first, alone=True),
    "before_commit": Scenario(returns()),
    "after_commit_before_told": Scenario(returns()),
    "in_audit_chain": Scenario(is_chained),
    "after_submit_before_answer": Scenario(returns()),
    "after_commit_before_launch": Scenario(returns()),
    "after_order_left": Scenario(returns()),
    "after_ack_before_answer": Scenario(returns()),
    "after_logs_before_state": Scenario(returns()),
    "in_ledger_batch": Scenario(returns()),
    "after_upload_before_state": Scenario(returns()),
    "after_report_before_answer": Scenario(returns()),
    "after_stop_before_answer": Scenario(is_stopped),
    "after_hello_before_answer": Scenario(says_hello),
    "before_object_is_named": Scenario(sends_a_part),
    "after_part_before_answer": Scenario(returns(LARGE_BYTES)),
    "after_parts_are_deleted": Scenario(collects),
    "after_rows_before_output": Scenario(expires),
    "in_charging": Scenario(is_charged),
    "after_charges_before_more": Scenario(is_charged),
    "before_backup_is_named": Scenario(is_backed_up),
    "before_restored_is_named": Scenario(is_restored, alone=True),
    "after_restore_is_settled": Scenario(starts_restored, alone=True),
    "after_directory_before_launch": Scenario(returns(), of_node=True),
    "before_secrets_are_complete": Scenario(has_secrets, of_node=True),
    "after_secrets_before_launch": Scenario(has_secrets, of_node=True),
    "after_launch_before_ack": Scenario(returns(), of_node=True),
    "after_answer_before_confirm": Scenario(returns(), of_node=True),
    "before_token_is_written": Scenario(renews, of_node=True),
    "after_token_is_written": Scenario(renews, of_node=True),
    "after_parts_before_report": Scenario(returns(LARGE_BYTES), of_node=True),
    "after_ending_before_settled": Scenario(returns(), of_node=True),
    "after_exec_before_told": Scenario(loses_its_supervisor, of_node=True),
    "after_ending_before_told": Scenario(returns(), of_node=True),
    "after_freed_before_receipt": Scenario(returns(), of_node=True),
}
