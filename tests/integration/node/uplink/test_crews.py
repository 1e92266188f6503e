"""A gang on two nodes: its crews meet, run as one, and end as one, whoever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.spec import Command
from serverless_gpu.node.attempt.claim import has_begun
from serverless_gpu.node.attempt.history import first_facts
from serverless_gpu.node.base.network import is_loopback
from tests.support.golden import golden
from tests.support.local.observe import announced, nothing_of_a_run, supervisor, wait_for
from tests.support.local.ranks import announce, rank_number, stay, wait_for_file
from tests.support.node.gangs import SeenCrew, order_gang
from tests.support.node.node import Node


def add_up() -> tuple[int, int, str]:
    """Add all ranks' numbers with gloo; return this rank's, the sum and where they met."""
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    number = torch.tensor([rank_number()])
    dist.all_reduce(number)
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
    return rank_number(), int(number.item()), os.environ["MASTER_ADDR"]


def add_up_until_one_dies() -> None:
    """Add up with gloo; the last rank dies of it, and the others are told by their sockets only."""
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    number = torch.tensor([rank_number()])
    dist.all_reduce(number)
    if rank_number() == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(number)


def fail_on_the_second(where: str) -> None:
    """Fail in the last rank once all are there; the others wait."""
    announce(where, f"rank{rank_number()}")
    if rank_number() == 3:
        for rank in range(3):
            wait_for_file(where, f"rank{rank}")
        raise ValueError("no luck in rank 3")
    wait_for_file(where, "go")


def second_stays(where: str) -> int:
    """Return at once on the first node; wait for `go` on the second."""
    announce(where, f"rank{rank_number()}")
    if rank_number() > 1:
        wait_for_file(where, "go")
    return rank_number()


def detail(crew: SeenCrew) -> str:
    """Return the words with which a crew ended."""
    assert crew.ending is not None and crew.ending.stopped
    return str(msgspec.json.decode(bytes(crew.ending.stopped))["cause"]["detail"])


def supervisor_of(node: Node, crew: SeenCrew) -> int:
    return supervisor(node.home.root, crew.start.run_id).pid


def assert_nothing_is_left(nodes: list[Node]) -> None:
    for node in nodes:
        wait_for(lambda node=node: nothing_of_a_run(node.home.root), "nothing is left")  # type: ignore[misc]  # mypy does not type a lambda's defaults


# --- meeting and running ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_two_nodes_with_two_ranks_each_add_up_over_gloo(nodes: list[Node]) -> None:
    gang = order_gang(nodes[0].server, add_up).settled()
    assert [crew.reason for crew in gang.crews] == [Reason.COMPLETED] * 2
    for crew, ranks in zip(gang.crews, ((0, 1), (2, 3)), strict=True):
        assert set(crew.logs) - {"0.telemetry", "1.telemetry"} == {f"{rank}.stdout" for rank in ranks}
        assert [crew.logs[f"{rank}.stdout"] for rank in ranks] == [b"done\n"] * 2
        assert set(crew.files) == {f"results/{rank}.pkl" for rank in ranks}
        assert crew.receipt is not None and crew.receipt["world_size"] == 2
    assert gang.chosen is not None and gang.chosen.master[1] == (
        gang.crews[0].offer and gang.crews[0].offer.rendezvous_port
    )
    offered = gang.crews[0].offer
    assert offered is not None
    outside = [one.address for one in offered.addresses if not is_loopback(one)]
    assert not outside or gang.chosen.master[0] in outside
    assert_nothing_is_left(nodes)


def test_a_command_runs_once_on_each_node_and_knows_which_it_is(nodes: list[Node]) -> None:
    words = 'echo "$POD_RANK of $NUM_NODES, $LOCAL_WORLD_SIZE of $WORLD_SIZE, $MASTER_ADDR"'
    gang = order_gang(
        nodes[0].server, None, shares=(2, 1), spec={"payload": Command(argv=("sh", "-c", words), per="node")}
    ).settled()
    assert gang.chosen is not None
    master = gang.chosen.master[0]
    assert [crew.reason for crew in gang.crews] == [Reason.COMPLETED] * 2
    assert gang.crews[0].logs["0.stdout"] == f"0 of 2, 2 of 3, {master}\n".encode()
    assert gang.crews[1].logs["1.stdout"] == f"1 of 2, 1 of 3, {master}\n".encode()


def test_F14_no_user_code_begins_before_all_have_met(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where)
    gang.holds_chosen = True
    wait_for(lambda: all(crew.reach is not None for crew in gang.crews), "all have tried all")
    assert not any(crew.reports[-1].exec_ns for crew in gang.crews)
    for node, crew in zip(nodes, gang.crews, strict=True):
        assert not has_begun(first_facts(node.directory(crew)))
    gang.holds_chosen = False
    gang.tell_all()
    for rank in range(4):
        announced(Path(where), f"rank{rank}")
    Path(where, "go").touch()
    gang.settled()


# --- ending -----------------------------------------------------------------------------------------------------------


def test_F06_a_rank_that_raises_on_one_node_ends_those_on_the_other(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, fail_on_the_second, where).settled()
    first, second = gang.crews
    assert (second.reason, first.reason) == (Reason.RANK_RAISED, Reason.PEER_FAILED)
    assert second.halt is not None and second.halted_before_ending
    assert {"failures/3.json", "failures/3.pkl"} <= second.files_at_halt, "whoever is told of it may look"
    assert (second.halt.reason, second.halt.rank, second.halt.peer_lost) == (Reason.RANK_RAISED, 3, False)
    assert detail(first) == golden("node.crews.n1-valueerror-luck")
    assert gang.cause is not None and (gang.cause.crew, gang.cause.rank) == (1, 3)
    assert "failures/3.json" in second.files and not any("failures/3" in name for name in first.files)
    assert_nothing_is_left(nodes)


@pytest.mark.long
def test_F01_a_crash_on_one_node_is_the_story_whatever_ranks_on_the_other_say_of_it(nodes: list[Node]) -> None:
    gang = order_gang(nodes[0].server, add_up_until_one_dies).settled()
    first, second = gang.crews
    assert second.reason is Reason.RANK_SIGNAL and second.halt is not None and second.halt.rank == 3
    assert first.halt is not None and (first.halt.reason is Reason.PEER_FAILED or first.halt.peer_lost)
    over = gang.fold.over
    assert gang.cause is not None and gang.cause.crew == 1 and over is not None
    assert over.reason is Reason.RANK_SIGNAL
    assert_nothing_is_left(nodes)


def test_ranks_that_returned_wait_for_those_on_the_other_node(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, second_stays, where)
    first, second = gang.crews
    rank0, _ = announced(Path(where), "rank0")
    wait_for(lambda: first.returned, "the first node has returned")
    assert rank0.alive() and first.ending is None and first.reports[-1].state is State.RUNNING
    Path(where, "go").touch()
    gang.settled()
    assert (first.reason, second.reason) == (Reason.COMPLETED, Reason.COMPLETED)
    assert first.halt is None and second.halt is None


@pytest.mark.long
def test_a_crew_that_is_stopped_while_it_waits_for_the_others_does_not_wait(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, second_stays, where)
    first, second = gang.crews
    wait_for(lambda: first.returned, "the first node has returned")
    second.stop = StopReason.CANCEL
    gang.settled()
    assert (second.reason, first.reason) == (Reason.CANCELLED, Reason.PEER_FAILED)


@pytest.mark.long
def test_a_stop_that_comes_after_all_have_returned_ends_no_crew(nodes: list[Node], where: str) -> None:
    """One is told by the order to stop, before anything else; the other one by an answer that says both."""
    server = nodes[0].server
    gang = order_gang(server, second_stays, where)
    gang.holds_release = True
    Path(where, "go").touch()
    first, second = gang.crews
    wait_for(lambda: first.returned and second.returned, "both nodes have returned")
    server.order_stop(first, StopReason.CANCEL, released=True)
    wait_for(lambda: first.ending, "the first node has ended")
    second.stop = StopReason.CANCEL
    gang.holds_release = False
    gang.look(second)
    assert [crew.reason for crew in gang.settled().crews] == [Reason.COMPLETED] * 2


# --- the meeting fails ------------------------------------------------------------------------------------------------


def test_crews_that_do_not_know_each_other_are_apart_and_both_are_named(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where)
    gang.holds_offers = True
    gang.has_offers()
    second = gang.crews[1].offer
    assert second is not None
    gang.crews[1].offer = msgspec.structs.replace(second, port=1)  # nobody listens there
    gang.holds_offers = False
    gang.tell_all()
    gang.settled()
    assert gang.apart is not None and gang.apart.pair == (0, 1)
    assert gang.apart.sentence.startswith("n0 does not reach n1: tried ")
    assert [crew.reason for crew in gang.crews] == [Reason.PEER_FAILED] * 2
    assert all(crew.ending is not None and not crew.ending.began for crew in gang.crews)
    assert not list(Path(where).glob("rank*"))


def test_a_cancel_in_the_meeting_ends_both(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where)
    gang.holds_offers = True
    gang.has_offers()
    for crew in gang.crews:
        crew.stop = StopReason.CANCEL
    gang.settled()
    assert [crew.reason for crew in gang.crews] == [Reason.CANCELLED] * 2
    assert not any(crew.ending is None or crew.ending.began for crew in gang.crews)
    assert_nothing_is_left(nodes)


def test_F18_a_lease_that_ends_in_the_meeting_ends_the_crew(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where, partition_grace_s=3.0)
    gang.holds_offers = True
    gang.has_offers()
    nodes[0].server.away = True
    for node in nodes:
        wait_for(lambda node=node: nothing_of_a_run(node.home.root), "it has ended by its own clock")  # type: ignore[misc]  # mypy does not type a lambda's defaults
    nodes[0].server.away = False
    gang.settled()
    assert [crew.reason for crew in gang.crews] == [Reason.NODE_PARTITIONED] * 2


@pytest.mark.long
def test_a_supervisor_killed_in_the_meeting_ends_both(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where)
    gang.holds_offers = True
    gang.has_offers()
    supervisor(nodes[1].home.root, gang.crews[1].start.run_id).kill()
    gang.settled()
    first, second = gang.crews
    assert (second.reason, first.reason) == (Reason.SUPERVISOR_KILLED, Reason.PEER_FAILED)
    assert second.ending is not None and not second.ending.began, "crews that have not met run no user code"
    assert_nothing_is_left(nodes)


def test_a_supervisor_killed_while_it_runs_ends_both(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where).running()
    supervisor(nodes[0].home.root, gang.crews[0].start.run_id).kill()
    gang.settled()
    first, second = gang.crews
    assert (first.reason, second.reason) == (Reason.SUPERVISOR_KILLED, Reason.PEER_FAILED)
    assert_nothing_is_left(nodes)


# --- the uplink -------------------------------------------------------------------------------------------------------


def test_F15_an_uplink_killed_in_the_meeting_is_not_missed(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where)
    gang.holds_offers = True
    gang.has_offers()
    nodes[1].uplink().kill()
    offered = gang.crews[1].offer
    gang.crews[1].offer = None
    nodes[1].restart()
    wait_for(lambda: gang.crews[1].offer, "it is said again")
    assert gang.crews[1].offer == offered
    gang.holds_offers = False
    gang.tell_all()
    gang.running()
    Path(where, "go").touch()
    assert [crew.reason for crew in gang.settled().crews] == [Reason.COMPLETED] * 2


@pytest.mark.long
def test_F15_an_uplink_killed_before_the_release_is_not_missed(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, second_stays, where)
    gang.holds_release = True
    first, second = gang.crews
    wait_for(lambda: first.returned, "the first node has returned")
    nodes[0].uplink().kill()
    first.returned = False
    Path(where, "go").touch()
    wait_for(lambda: second.returned, "the second has returned, too")
    nodes[0].restart()
    wait_for(lambda: first.returned, "it is said again")
    gang.holds_release = False
    gang.tell_all()
    assert [crew.reason for crew in gang.settled().crews] == [Reason.COMPLETED] * 2


# --- orders -----------------------------------------------------------------------------------------------------------


def test_an_order_whose_gang_cannot_be_is_refused_in_words(nodes: list[Node], where: str) -> None:
    gang = order_gang(nodes[0].server, stay, where, nonce="")
    for crew in gang.crews:
        wait_for(lambda crew=crew: crew.ending, "it is refused")  # type: ignore[misc]  # mypy does not type a lambda's defaults
        assert crew.reason is Reason.REFUSED
        assert golden("node.crews.nothing-know-each") in crew.reports[0].sentence
