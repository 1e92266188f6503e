"""What operators decide: pools that lend, and shares of the queue; and what others see of it."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.model.scheduling.values import Reservation, TeamUse, Wait, WaitReason
from serverless_gpu.model.spec import Priority, Resources
from serverless_gpu.model.usage_policy import UsagePolicy
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit
from serverless_gpu.server.records.pools import StoredShare
from serverless_gpu.server.runs import queue_views
from serverless_gpu.server.runs.queue_views import QueueQuery
from serverless_gpu.server.scheduling.wait_reasons import WaitNotice
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.nodes import PoolRequest
from serverless_gpu.wire.queue import ShareView
from tests.support.golden import golden
from tests.support.server.agents import NODE, hello
from tests.support.server.made import made_services
from tests.support.server.stored import add_people
from tests.support.server.submitting import ALICE, BOB, request

ROOT = Caller(name="root", role="admin", token_id="t")


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice", "bob", "root")
    made = made_services(database, tmp_path, clock=clock)
    made.principals.make_team(ROOT, "search")
    return made


def written(services: Services) -> list[tuple[str, str, dict[str, object]]]:
    entries = services.database.read(audit.entries)
    return [(entry.action, entry.subject, entry.detail) for entry in entries if entry.action != "team.create"]


def test_a_reserved_pool_lends_and_what_is_not_said_stays(services: Services) -> None:
    view = services.pools.put(ROOT, "research", PoolRequest(kind="reserved", lends=True, return_s=60.0))
    assert (view.kind, view.lends, view.return_s) == ("reserved", True, 60.0)
    view = services.pools.put(ROOT, "research", PoolRequest(return_s=90.0))
    assert (view.kind, view.lends, view.return_s) == ("reserved", True, 90.0)
    with pytest.raises(InvalidValue, match=re.escape(golden("server.dividing.demand-cannot-lend"))) as caught:
        services.pools.put(ROOT, "research", PoolRequest(kind="on-demand", lends=True))
    assert "--reserved --lend" in caught.value.hint
    view = services.pools.put(ROOT, "research", PoolRequest(kind="on-demand"))
    assert (view.kind, view.lends) == ("on-demand", False)
    view = services.pools.put(ROOT, "research", PoolRequest(kind="reserved"))
    assert not view.lends  # it lent once, long ago
    lent = {"kind": "reserved", "nodes": [], "lends": True}
    assert [detail for *_, detail in written(services)] == [
        lent | {"return_s": 60.0},
        lent | {"return_s": 90.0},
        {"kind": "on-demand", "nodes": []},
        {"kind": "reserved", "nodes": []},
    ]


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, 8 * 86_400.0])
def test_a_time_in_which_nothing_is_back_is_refused(services: Services, seconds: float) -> None:
    with pytest.raises(InvalidValue, match="pool cannot wait"):
        services.pools.put(ROOT, "research", PoolRequest(kind="reserved", return_s=seconds))


def test_a_share_is_set_for_who_is_there_and_the_scheduler_is_woken(services: Services) -> None:
    bell = services.hub.version(SCHEDULER)
    assert services.pools.put_share(ROOT, "team", "search", 70.0) == ShareView(kind="team", name="search", weight=70.0)
    assert services.hub.version(SCHEDULER) != bell
    services.pools.put_share(ROOT, "user", "alice", 0.5)
    assert services.pools.remove_share(ROOT, "user", "alice").weight == 1.0
    assert written(services) == [
        ("share.set", "team search", {"weight": 70.0}),
        ("share.set", "user alice", {"weight": 0.5}),
        ("share.remove", "user alice", {}),
    ]
    with pytest.raises(NotFound, match=re.escape(golden("server.dividing.share-set-user"))):
        services.pools.remove_share(ROOT, "user", "alice")


@pytest.mark.parametrize(
    ("kind", "name", "weight", "error", "says"),
    [
        ("team", "serach", 1.0, NotFound, "no team 'serach'"),
        ("user", "carol", 1.0, NotFound, "carol"),
        ("pool", "search", 1.0, InvalidValue, "a 'pool' cannot have a share"),
        ("team", "search", 0.0, InvalidValue, "cannot be 0.0"),
        ("team", "search", math.nan, InvalidValue, "cannot be nan"),
        ("team", "search", math.inf, InvalidValue, "cannot be inf"),
    ],
)
def test_a_share_that_cannot_be_is_refused(
    services: Services, kind: str, name: str, weight: float, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        services.pools.put_share(ROOT, kind, name, weight)
    assert written(services) == []


def test_22D1_shares_say_what_is_due_what_was_used_and_what_counts() -> None:
    there = [
        StoredShare(kind="team", name="search", weight=70.0, set_ns=1),
        StoredShare(kind="team", name="ads", weight=29.0, set_ns=1),
        StoredShare(kind="user", name="bob", weight=3.0, set_ns=1),
    ]
    usage = {
        "search": TeamUse(used_gpu_s=600.0, counted_gpu_s=720.0),
        "~carol": TeamUse(used_gpu_s=200.0, counted_gpu_s=200.0),
    }
    assert queue_views.share_views(there, usage) == [
        ShareView(kind="team", name="search", weight=70.0, due=0.7, used_gpu_s=600.0, counted_gpu_s=720.0, part=0.75),
        ShareView(kind="team", name="ads", weight=29.0, due=0.29, used_gpu_s=0.0, counted_gpu_s=0.0, part=0.0),
        ShareView(kind="user", name="carol", weight=1.0, due=0.01, used_gpu_s=200.0, counted_gpu_s=200.0, part=0.25),
        ShareView(kind="user", name="bob", weight=3.0),
    ]
    assert queue_views.share_views([], {}) == []


def test_members_see_their_own_shares_and_those_of_their_teams(services: Services) -> None:
    services.principals.make_team(ROOT, "ads")
    for kind, name in (("team", "search"), ("team", "ads"), ("user", "alice"), ("user", "bob")):
        services.pools.put_share(ROOT, kind, name, 2.0)

    def seen(who: Caller, reach: str) -> list[str]:
        return [each.name for each in services.queue_views.view_shares(who, reach).shares]

    assert seen(ROOT, "all") == ["ads", "search", "alice", "bob"]
    assert seen(ALICE, "team") == ["search", "alice"]
    assert seen(BOB, "team") == ["bob"]
    assert services.queue_views.view_shares(BOB, "team").half_life_s == services.settings.queue.half_life_s


def test_the_queue_names_what_somebody_may_see_and_whose_the_rest_is(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.policies.put(ROOT, "urgent", UsagePolicy(priorities=(Priority.NORMAL, Priority.CRITICAL)))
    services.policies.attach(ROOT, "urgent", "user", "alice")
    asked = (
        (ALICE, request(name="fit", team="search", resources=Resources(gpus=8, gpu_type="H100"))),
        (ALICE, request(name="now", priority=Priority.CRITICAL)),
        (BOB, request(name="other", resources=Resources(gpus=2))),
    )
    made: list[str] = []
    for who, one in asked:
        made.append(services.submissions.submit(who, one).id)
        services.clock.advance(1)  # type: ignore[attr-defined] # a FakeClock
    first, urgent, theirs = made

    def look(who: Caller, reach: str, *, limit: int = 50, mine: bool = False) -> list[tuple[object, ...]]:
        view = services.queue_views.view(who, reach, limit=limit, mine=mine)
        assert view.waiting == 3
        return [(each.run, each.name, each.owner, each.gpus, each.sentence) for each in view.entries]

    # Nobody has looked yet: by class and age, and nothing is said.
    mine = [(urgent, "now", "alice", None, ""), (first, "fit", "alice", 8, "")]
    assert look(ALICE, "team") == [*mine, ("", "", "bob", 2, "")]
    assert look(ALICE, "team", mine=True) == mine
    assert look(BOB, "team", mine=True) == [(theirs, "other", "bob", 2, "")]
    assert [run for run, *_ in look(ROOT, "all", limit=2)] == [urgent, first]
    # As the scheduler has it: the order of its shares, and what it keeps for whom.
    wait = Wait(run_id=theirs, reason=WaitReason.CAPACITY, place=1)
    soon_ns = services.clock.wall_ns() + 7
    kept = Reservation(run_id=theirs, shares=(), at_ns=soon_ns, is_bound=True)
    late = Reservation(run_id=first, shares=(), at_ns=soon_ns - 8, is_bound=True)
    monkeypatch.setattr(services.sentences, "order", lambda limit: (theirs,))
    monkeypatch.setattr(services.sentences, "glance", lambda run_id: WaitNotice(sentence=f"told {run_id}", wait=wait))
    monkeypatch.setattr(services.sentences, "reservations", lambda: (kept, late))
    seen = services.queue_views.view(BOB, "team", limit=50, mine=False).entries
    assert [(each.owner, each.place, each.reserved_ns, each.is_bound) for each in seen] == [
        ("bob", 1, soon_ns, True),
        ("alice", 0, None, False),
        ("alice", 0, None, False),
    ]
    assert [each.sentence for each in seen] == [f"told {theirs}", "", ""]
    assert [each.waiting is not None and each.waiting.place for each in seen] == [1, False, False]
    assert seen[1].priority is Priority.CRITICAL and (seen[2].team, seen[2].gpu_type) == ("search", "H100")


def test_F82_what_is_found_to_be_never_possible_is_listed_last(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, next_one = (services.submissions.submit(ALICE, request(name=name)).id for name in ("never", "next"))
    waits = {
        never: Wait(run_id=never, reason=WaitReason.UNSATISFIABLE, words="no node has A10"),
        next_one: Wait(run_id=next_one, reason=WaitReason.CAPACITY, place=1),
    }
    monkeypatch.setattr(services.sentences, "order", lambda limit: (never, next_one))
    monkeypatch.setattr(services.sentences, "glance", lambda run_id: WaitNotice(sentence="told", wait=waits[run_id]))
    seen = services.queue_views.view(ROOT, "all", limit=50, mine=False).entries
    assert [(each.run, each.place) for each in seen] == [(next_one, 1), (never, 0)]


def test_the_queue_is_in_the_order_of_the_shares_and_use_is_what_was_used(services: Services, clock: FakeClock) -> None:
    agents, scheduler = services.agents, make_scheduler(services)
    add_people(services.database, "node")  # type: ignore[arg-type] # the fixture's is a Database
    agents.hello(NODE, hello())
    services.pools.put_share(ROOT, "team", "search", 70.0)
    whole = Resources(gpus=8, gpu_type="H100")
    asked = request(name="going", team="search", resources=whole)
    services.submissions.submit(ALICE, asked)
    scheduler.tick(services.clock.boottime_ns())
    clock.advance(600)
    agents.hello(NODE, hello())
    more = [request(team="search", resources=whole), request(resources=whole)]
    for who, one in zip((ALICE, BOB), more, strict=True):
        services.submissions.submit(who, one)
    scheduler.tick(services.clock.boottime_ns())
    view = services.queue_views.view(ROOT, "all", limit=50, mine=False)
    assert [(each.owner, each.place) for each in view.entries] == [("bob", 1), ("alice", 2)]
    assert "alice/going holds 8" in view.entries[0].sentence
    (share,) = services.queue_views.view_shares(ROOT, "all").shares
    assert (share.name, share.weight, share.part) == ("search", 70.0, 1.0)
    assert share.used_gpu_s == pytest.approx(8 * 600, rel=0.2)


def test_one_look_at_the_queue_is_bounded_because_each_entry_costs_one() -> None:
    assert msgspec.convert({"limit": "50"}, QueueQuery, strict=False) == QueueQuery()
    with pytest.raises(msgspec.ValidationError, match="<= 50"):
        msgspec.convert({"limit": "51"}, QueueQuery, strict=False)
