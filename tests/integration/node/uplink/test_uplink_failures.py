"""Any process or line may fail: runs go on, nothing is lost, nothing runs twice, and a node that is cut off stops."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.node.attempt.claim import LOCK
from serverless_gpu.node.attempt.history import read_ending
from serverless_gpu.node.attempt.retention import scan
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.start_stop import running
from serverless_gpu.testing import agent_status
from serverless_gpu.wire.agents import NOT_SENT
from tests.support.golden import golden
from tests.support.local.observe import Process, agent, announced, supervisor, wait_for
from tests.support.local.ranks import announce, rank_number, stay
from tests.support.node.agent_server import AgentServer, SeenAttempt
from tests.support.node.node import Node

MONTH_NS = 31 * 86_400 * 10**9


def talk(where: str) -> int:
    """Say a line, wait for the file `go`, say another one."""
    print("before", flush=True)
    stay(where)
    print("after", flush=True)
    return rank_number()


def talk_once(where: str) -> int:
    """Say a line, then wait for the file `go`."""
    print("before", flush=True)
    return stay(where)


def large_result(where: str) -> bytes:
    """Return many bytes."""
    announce(where, f"rank{rank_number()}")
    return b"y" * (1 << 20)


def much_output(where: str) -> None:
    """Write more than one report carries, then wait for the file `go`."""
    sys.stdout.write("y" * (3 << 20))
    sys.stdout.flush()
    stay(where)


def detail(attempt: SeenAttempt) -> str:
    """Return the words with which an attempt ended."""
    assert attempt.ending is not None and attempt.ending.stopped
    return str(msgspec.json.decode(bytes(attempt.ending.stopped))["cause"]["detail"])


# --- the uplink -------------------------------------------------------------------------------------------------------


def test_F15_a_killed_uplink_is_not_missed_and_the_next_one_goes_on(node: Node, where: str) -> None:
    attempt = node.run(talk, where, ranks=2).running()
    ranks = [announced(Path(where), f"rank{number}")[0] for number in range(2)]
    wait_for(lambda: attempt.logs.get("0.stdout") == b"before\n", "the first line is there")
    node.uplink().kill()
    assert all(rank.alive() for rank in ranks)
    reports = len(attempt.reports)
    node.restart()
    wait_for(lambda: len(attempt.reports) > reports, "it is heard of again")
    assert all(rank.alive() for rank in ranks) and attempt.reports[-1].state is State.RUNNING
    Path(where, "go").touch()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED and attempt.endings == 1
    assert attempt.logs["0.stdout"] == attempt.logs["1.stdout"] == b"before\nafter\n"
    assert sorted(attempt.facts) == list(range(len(attempt.facts)))


def test_F33_an_ending_that_nobody_heard_is_told_by_the_next_uplink(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    announced(Path(where), "rank0")
    node.server.away = True
    Path(where, "go").touch()
    wait_for(lambda: read_ending(node.directory(attempt)), "it has ended")
    node.uplink().kill()
    assert attempt.ending is None
    node.server.away = False
    node.restart()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED and attempt.logs["0.stdout"] == b"before\nafter\n"
    assert set(attempt.files) == {"results/0.pkl"}


def test_F33_an_ending_is_told_until_it_is_answered(node: Node, where: str) -> None:
    attempt = node.run(stay, where).running()
    node.server.hold_reports.clear()
    Path(where, "go").touch()
    wait_for(lambda: read_ending(node.directory(attempt)), "it has ended")
    node.server.stop()
    node.server.hold_reports.set()
    node.server.start()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED


def test_user_code_waits_for_the_servers_first_answer(node: Node, where: str) -> None:
    node.server.hold_reports.clear()
    attempt = node.run(stay, where)
    wait_for(lambda: attempt.start.seq in node.server.acknowledged, "the order is taken")
    facts = node.directory(attempt) / "facts.jsonl"
    wait_for(lambda: facts.exists() and "reserved" in facts.read_text(), "it has its devices")
    assert not Path(where, "rank0").exists()
    node.server.hold_reports.set()
    announced(Path(where), "rank0")
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED


def test_an_uplink_killed_before_that_answer_leaves_a_run_that_never_began(node: Node, where: str) -> None:
    node.server.hold_reports.clear()
    attempt = node.run(stay, where)
    facts = node.directory(attempt) / "facts.jsonl"
    wait_for(lambda: facts.exists() and "reserved" in facts.read_text(), "it has its devices")
    node.uplink().kill()
    wait_for(lambda: read_ending(node.directory(attempt)), "its supervisor ends it")
    node.server.hold_reports.set()
    node.restart()
    attempt.settled()
    assert attempt.reason is Reason.REFUSED and attempt.ending is not None and not attempt.ending.began
    assert golden("node.uplink_failures.node-uplink-ended") in detail(attempt)
    assert not Path(where, "rank0").exists()


def test_F33_output_that_the_server_lost_after_it_was_acknowledged_is_sent_again(node: Node, where: str) -> None:
    attempt = node.run(talk_once, where).running()
    wait_for(lambda: attempt.logs.get("0.stdout") == b"before\n", "the server has it")
    attempt.logs["0.stdout"] = b"be"  # its machine lost power
    Path(where, "go").touch()
    attempt.settled()
    wait_for(lambda: node.standing(attempt) == "settled", "the node knows that the server has everything")
    assert attempt.logs["0.stdout"] == b"before\n" and attempt.endings == 1


def test_an_attempt_that_is_over_before_it_begins_never_begins(node: Node, where: str) -> None:
    node.server.hold_reports.clear()
    attempt = node.run(stay, where)
    attempt.stale = True
    node.server.hold_reports.set()
    wait_for(lambda: read_ending(node.directory(attempt)), "it ends")
    wait_for(lambda: node.standing(attempt) == "stale", "that is written down")
    assert not Path(where, "rank0").exists() and attempt.reports == []


@pytest.mark.long
def test_an_attempt_that_is_over_for_the_server_is_ended_also_when_the_uplink_is_killed_meanwhile(
    node: Node, where: str
) -> None:
    attempt = node.run(stay, where).running()
    rank, _ = announced(Path(where), "rank0")
    keeper = supervisor(node.home.root, attempt.start.run_id)
    keeper.send(signal.SIGSTOP)  # nobody hears that it is to be stopped
    attempt.stale = True
    wait_for(
        lambda: golden("node.uplink_failures.attempt-over-server", run_id=attempt.start.run_id) in node.log(),
        "the uplink knows",
    )
    node.uplink().kill()
    assert node.standing(attempt) == "open"
    keeper.send(signal.SIGCONT)
    node.restart()
    rank.wait_gone()
    wait_for(lambda: node.standing(attempt) == "stale", "it has ended")


# --- the server -------------------------------------------------------------------------------------------------------


def test_an_order_that_was_refused_and_comes_again_is_not_started(node: Node, where: str) -> None:
    node.server.hold_reports.clear()  # the refusal is on its way
    node.home.runs.write_text("no directory")
    attempt = node.run(talk, where)
    wait_for(lambda: "cannot accept attempt" in node.log(), "it is refused")
    node.home.runs.unlink()  # now it could be started
    node.server.again(attempt)
    node.server.hold_reports.set()
    wait_for(lambda: attempt.ending is not None, "the server hears of the refusal")
    assert node.run(rank_number).settled().reason is Reason.COMPLETED
    assert not node.directory(attempt).exists() and not Path(where, "rank0").exists()


def test_an_attempt_whose_directory_cannot_be_read_is_neither_refused_nor_started_again(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    wait_for(lambda: attempt.start.seq in node.server.acknowledged, "the order is taken")
    node.uplink().kill()
    remote = node.directory(attempt) / "remote.json"
    text = remote.read_bytes()
    remote.write_bytes(b"cannot be read")
    node.server.acknowledged.clear()  # the order comes again
    node.restart()
    wait_for(lambda: attempt.start.seq in node.server.acknowledged, "the order is taken")
    assert attempt.ending is None
    node.uplink().kill()
    remote.write_bytes(text)
    node.restart()
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED and attempt.endings == 1


@pytest.mark.long
def test_an_attempt_whose_lock_cannot_be_looked_at_is_not_refused_it_may_be_running(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    node.uplink().kill()
    channel = node.home.sockets() / f"{attempt.start.run_id}.sock"
    lock = node.directory(attempt) / LOCK
    channel.rename(f"{channel}.aside")
    lock.rename(f"{lock}.aside")
    lock.mkdir()  # as a disk that answers with errors: neither free nor held
    node.restart()
    wait_for(
        lambda: golden("node.uplink_failures.cannot-looked") in attempt.reports[-1].sentence,
        "the server is told what is wrong",
    )
    assert attempt.ending is None
    lock.rmdir()
    Path(f"{lock}.aside").rename(lock)
    Path(f"{channel}.aside").rename(channel)
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED


def test_F17_a_server_away_for_less_than_the_grace_is_told_everything(node: Node, where: str) -> None:
    attempt = node.run(talk, where, partition_grace_s=60.0).running()
    rank, _ = announced(Path(where), "rank0")
    node.server.stop()
    Path(where, "go").touch()
    rank.wait_gone()
    wait_for(lambda: read_ending(node.directory(attempt)), "it has ended")
    node.server.start()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED and attempt.logs["0.stdout"] == b"before\nafter\n"


def test_F18_a_node_cut_off_for_longer_than_the_grace_stops_its_ranks_by_itself(node: Node, where: str) -> None:
    attempt = node.run(talk, where, partition_grace_s=5.0).running()
    rank, _ = announced(Path(where), "rank0")
    node.server.stop()
    rank.wait_gone()
    attempt.stale = True
    node.server.start()
    wait_for(lambda: node.standing(attempt) == "stale", "it is told that the attempt is over")
    stopped = read_ending(node.directory(attempt))
    assert stopped is not None and stopped.reason is Reason.NODE_PARTITIONED
    assert attempt.ending is None and (node.directory(attempt) / "logs" / "0.stdout").exists()


@pytest.mark.long
def test_F18_also_with_the_uplink_killed(node: Node, where: str) -> None:
    attempt = node.run(talk, where, partition_grace_s=5.0).running()
    rank, _ = announced(Path(where), "rank0")
    node.uplink().kill()
    rank.wait_gone()
    node.restart()
    attempt.settled()
    assert attempt.reason is Reason.NODE_PARTITIONED and attempt.ending is not None and attempt.ending.began


@pytest.mark.long
def test_F18_a_node_that_stood_still_for_longer_than_the_grace_stops_its_ranks_when_it_goes_on(
    node: Node, where: str
) -> None:
    attempt = node.run(talk, where, partition_grace_s=5.0).running()
    rank, _ = announced(Path(where), "rank0")
    still = (node.uplink(), supervisor(node.home.root, attempt.start.run_id))
    for process in still:
        process.send(signal.SIGSTOP)
    over_ns = SystemClock().boottime_ns() + 6 * 10**9
    wait_for(lambda: SystemClock().boottime_ns() > over_ns, "the grace is over")
    attempt.stale = True
    for process in still:
        process.send(signal.SIGCONT)
    rank.wait_gone()
    wait_for(lambda: node.standing(attempt) == "stale", "it is told that the attempt is over")
    stopped = wait_for(lambda: read_ending(node.directory(attempt)), "it has ended")
    assert stopped is not None and stopped.state is not State.SUCCEEDED and attempt.ending is None


def test_a_server_that_comes_back_on_another_port_is_found(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    announced(Path(where), "rank0")
    node.server.stop()
    node.server.start(port=0)
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED
    later = node.run(stay, where).settled()
    assert later.reason is Reason.COMPLETED, "orders come again, too"


def test_what_a_server_has_not_heard_is_not_deleted_for_a_month(node: Node, where: str) -> None:
    attempt = node.run(stay, where).running()
    node.server.away = True
    Path(where, "go").touch()
    wait_for(lambda: (node.directory(attempt) / "receipt.json").exists(), "it has ended")

    def ended_ns(later_ns: int) -> int | None:
        (entry,) = scan(node.home.runs, (), wall_ns(node.directory(attempt)) + later_ns)
        return entry.ended_ns

    wait_for(lambda: ended_ns(MONTH_NS) is not None, "its supervisor is gone, too")
    assert ended_ns(0) is None
    node.server.away = False
    attempt.settled()
    wait_for(lambda: ended_ns(0) is not None, "it may be deleted")


def wall_ns(directory: Path) -> int:
    """Return when something was last written there; its uplink may write at this moment."""
    moments = [0]
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            moments.append(path.stat().st_mtime_ns)
    return max(moments)


def test_an_uplink_that_nobody_needs_ends_once_its_server_is_silent_for_long(server: AgentServer) -> None:
    home = Home(server.home)
    server.stop()
    program = f"""
from serverless_gpu.node.uplink import process
process.IDLE_S = 3.0
process.main({str(server.home)!r}, {str(server.profile)!r}, {{}})
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: running(home, server.profile), "it runs")
    wait_for(lambda: running(home, server.profile) is None, "it has ended by itself")


# --- results ----------------------------------------------------------------------------------------------------------


def test_F43_results_are_sent_for_as_long_as_it_takes_and_that_is_said(node: Node, where: str) -> None:
    node.server.refuse_parts = True
    attempt = node.run(large_result, where)

    def uploading() -> bool:
        return bool(attempt.reports) and golden("node.uplink_failures.results-do-get") in attempt.reports[-1].sentence

    wait_for(uploading, "it is said what it does")
    assert attempt.reports[-1].state is State.STOPPING and attempt.ending is None
    node.server.refuse_parts = False
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED
    blob = attempt.files["results/0.pkl"].blob
    assert blob is not None and all(part in node.server.parts for part in blob.parts)


def test_F43_results_that_cannot_be_sent_are_no_success_and_stay_on_the_node(server: AgentServer, where: str) -> None:
    from_now_on = Node(server)
    server.write_profile(upload_s=1.0)
    server.refuse_parts = True
    from_now_on.restart()
    attempt = from_now_on.run(large_result, where).settled()
    assert attempt.reason is Reason.RESULT_UPLOAD and attempt.ending is not None
    assert attempt.ending.state is State.FAILED and attempt.ending.began
    assert "the store answers 500" in detail(attempt) and str(from_now_on.directory(attempt)) in detail(attempt)
    assert (from_now_on.directory(attempt) / "results" / "0.pkl").stat().st_size > 1 << 20


@pytest.mark.long
def test_F43_a_cancel_gives_up_results_that_do_not_get_to_the_server(node: Node, where: str) -> None:
    node.server.refuse_parts = True
    attempt = node.run(large_result, where)

    def told() -> list[str]:
        return [report.sentence for report in attempt.reports if report.sentence.startswith(NOT_SENT)]

    (said, *_) = wait_for(told, "it is said")
    assert f"sgpu cancel {attempt.start.run_id}" in said
    wait_for(lambda: attempt.reports[-1].freed, "its devices are said to be free, though it has not ended")
    assert attempt.ending is None
    node.server.order_stop(attempt, StopReason.CANCEL)
    attempt.settled()
    assert attempt.reason is Reason.CANCELLED and attempt.endings == 1
    assert attempt.receipt is not None
    assert (attempt.receipt["state"], attempt.receipt["reason"]) == ("CANCELLED", "cancelled")
    assert "the store answers 500" in detail(attempt) and str(node.directory(attempt)) in detail(attempt)
    assert (node.directory(attempt) / "results" / "0.pkl").stat().st_size > 1 << 20


@pytest.mark.long
def test_F40_a_server_without_room_for_output_does_not_hold_a_run_and_is_told_what_it_lacks(
    node: Node, where: str
) -> None:
    attempt = node.run(much_output, where)
    attempt.disk_full = True
    full, running = "the server's disk is full", State.RUNNING
    wait_for(lambda: any(full in said.sentence and said.state is running for said in attempt.reports), "it is said")
    Path(where, "go").touch()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED and attempt.ending is not None
    assert attempt.ending.log_ends["0.stdout"] == 3 << 20
    assert set(attempt.ending.log_ends) <= {"0.stdout", "0.telemetry"}
    assert len([report for report in attempt.reports if report.logs]) < 10, "it is not tried without a pause"


def test_F40_output_arrives_whole_once_there_is_room(node: Node, where: str) -> None:
    attempt = node.run(talk, where)
    attempt.disk_full = True
    wait_for(
        lambda: attempt.reports and golden("node.uplink_failures.server-disk-full") in attempt.reports[-1].sentence,
        "it is said",
    )
    attempt.disk_full = False
    wait_for(lambda: attempt.logs.get("0.stdout") == b"before\n", "it is sent again")
    Path(where, "go").touch()
    attempt.settled()
    assert attempt.logs["0.stdout"] == b"before\nafter\n" and attempt.ending is not None
    assert attempt.ending.log_ends == {}


# --- the other processes of the node ----------------------------------------------------------------------------------


def test_22A8_a_killed_supervisor_is_billed_and_an_ending_once_its_ranks_are_gone(node: Node, where: str) -> None:
    attempt = node.run(stay, where, ranks=2).running()
    ranks = [announced(Path(where), f"rank{number}")[0] for number in range(2)]
    supervisor(node.home.root, attempt.start.run_id).kill()
    attempt.settled()
    assert not any(rank.alive() for rank in ranks)
    assert attempt.reason is Reason.SUPERVISOR_KILLED and attempt.ending is not None
    assert attempt.ending.began and not attempt.ending.stopped
    assert attempt.receipt is not None and attempt.receipt["gate"].startswith("not known")
    assert golden("node.uplink_failures.how-much-more") in attempt.receipt["notes"][0]
    assert attempt.receipt["gpu_ms"] > 0 and attempt.receipt["bill"]["billed_ms"] == attempt.receipt["gpu_ms"]
    assert attempt.facts[max(attempt.facts)] == "alive", "the server has its last sign of life"


@pytest.mark.long
def test_a_supervisor_killed_with_everything_else_is_an_ending_of_the_next_uplink(node: Node, where: str) -> None:
    attempt = node.run(stay, where).running()
    rank, _ = announced(Path(where), "rank0")
    keeper = supervisor(node.home.root, attempt.start.run_id)
    node.uplink().kill()
    agent(node.home.root).kill()
    keeper.kill()
    rank.wait_gone()
    node.restart()
    attempt.settled()
    assert attempt.reason is Reason.SUPERVISOR_KILLED and attempt.ending is not None and attempt.ending.began
    assert attempt.receipt is not None and attempt.receipt["facts"] == len(attempt.facts)


def test_an_agent_killed_with_the_launch_unread_is_replaced_and_the_run_starts_once(node: Node, where: str) -> None:
    node.run(large_result, where).settled()
    process = agent(node.home.root)
    stopped = _stopped(process)
    attempt = node.run(stay, where)
    wait_for(lambda: (node.directory(attempt) / "call.pkl").exists(), "the launch is on its way")
    stopped.kill()
    announced(Path(where), "rank0")
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED
    assert agent_status(node.home.root) is not None


def _stopped(process: Process) -> Process:

    process.send(signal.SIGSTOP)
    return process


def test_a_killed_agent_is_not_missed_by_a_run_that_goes_on(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    announced(Path(where), "rank0")
    agent(node.home.root).kill()
    Path(where, "go").touch()
    assert attempt.settled().reason is Reason.COMPLETED


# --- tokens of attempts -----------------------------------------------------------------------------------------------


def test_F69_a_token_that_ended_meanwhile_is_replaced_and_the_log_goes_on(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    wait_for(lambda: attempt.logs.get("0.stdout") == b"before\n", "the first line is there")
    attempt.token = "sgpa_the_next_one"  # nobody has told the node
    Path(where, "go").touch()
    attempt.settled()
    assert attempt.reason is Reason.COMPLETED and attempt.endings == 1
    assert attempt.logs["0.stdout"] == b"before\nafter\n"
    assert any(beat.renew == (f"{attempt.start.run_id}:1",) for beat in node.server.heartbeats)
    assert node.server.refused > 0
    assert b"sgpa_the_next_one" in (node.directory(attempt) / "remote.json").read_bytes()


@pytest.mark.long
def test_F69_a_token_that_comes_with_an_answer_is_used_and_outlives_the_uplink(node: Node, where: str) -> None:
    attempt = node.run(talk, where).running()
    attempt.next_token = "sgpa_the_next_one"
    wait_for(lambda: attempt.token == "sgpa_the_next_one", "it was handed over")
    remote = node.directory(attempt) / "remote.json"
    wait_for(lambda: b"sgpa_the_next_one" in remote.read_bytes(), "it is written down")
    node.uplink().kill()
    reports = len(attempt.reports)
    node.restart()
    wait_for(lambda: len(attempt.reports) > reports, "the next uplink reports with it")
    Path(where, "go").touch()
    attempt.settled()
    assert node.server.refused == 0 and not any(beat.renew for beat in node.server.heartbeats)
