"""Usage policies on a server: made, attached, and what becomes of runs that are asked for under them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.environment.documents import Root, Snapshot, SnapshotMember, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.stores.codec import encode
from serverless_gpu.errors import (
    InvalidValue,
    NotFound,
    PolicyViolation,
    ServerlessGpuError,
    UnknownGpuType,
)
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX, State
from serverless_gpu.model.scheduling.values import WaitReason
from serverless_gpu.model.spec import Priority, Resources
from serverless_gpu.model.usage_policy import PolicySubject, UsagePolicy
from serverless_gpu.server.composition import Services, make_planning, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.hub import SCHEDULER
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, runs
from serverless_gpu.server.records.runs import StoredRun
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest
from serverless_gpu.wire.agents import Start
from serverless_gpu.wire.nodes import PoolRequest
from serverless_gpu.wire.runs import EstimateRequest
from tests.support.environment.environments_in_stores import PYTHON
from tests.support.golden import golden
from tests.support.server.agents import NODE, hello
from tests.support.server.made import made_services
from tests.support.server.stored import add_people
from tests.support.server.submitting import LIVE, request

pytestmark = pytest.mark.any_database

ROOT = Caller(name="root", role="admin", token_id="t")
ALICE = Caller(name="alice", role="member", teams=("ads", "search"))
BOB = Caller(name="bob", role="member")


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    add_people(database, "alice", "bob", "root", "node")
    made = made_services(database, tmp_path, clock=clock)
    for team in ("search", "ads"):
        made.principals.make_team(ROOT, team)
    return made


def put(services: Services, name: str, **said: Any) -> None:
    services.policies.put(ROOT, name, UsagePolicy(**said))


def attach(services: Services, name: str, kind: str, holder: str) -> None:
    services.policies.attach(ROOT, name, kind, holder)


def stored(services: Services, who: Caller, **said: Any) -> StoredRun:
    view = services.submissions.submit(who, request(**said))
    run = services.database.read(lambda connection: runs.find(connection, view.id))
    assert run is not None
    return run


def written(services: Services) -> list[tuple[str, str, dict[str, object]]]:
    entries = services.database.read(audit.entries)
    return [(each.action, each.subject, each.detail) for each in entries if each.action.startswith("policy.")]


# --- made and attached ------------------------------------------------------------------------------------------------


def test_every_change_is_written_down_and_what_changes_nothing_is_not(services: Services) -> None:
    bell = services.hub.version(SCHEDULER)
    put(services, "llm", gpu_types=("h100",), max_run_s=3.0, priorities=(Priority.NORMAL,))
    assert services.hub.version(SCHEDULER) != bell
    for _ in range(2):
        attach(services, "llm", "user", "alice")
    view = services.policies.attach(ROOT, "llm", "team", "search")
    assert view.holders == (PolicySubject(kind="team", name="search"), PolicySubject(kind="user", name="alice"))
    assert services.policies.view(ROOT, "llm") == view and view.gpu_types == ("H100",)
    services.policies.detach(ROOT, "llm", "team", "search")
    with pytest.raises(InvalidValue, match=re.escape(golden("server.attaching.llm-attached-user"))) as caught:
        services.policies.delete(ROOT, "llm")
    assert caught.value.hint == golden("server.attaching.detach-first-sgpu")
    services.policies.detach(ROOT, "llm", "user", "alice")
    assert services.policies.delete(ROOT, "llm").name == "llm"
    assert services.policies.view_all(ROOT) == ()
    assert written(services) == [
        ("policy.set", "llm", {"gpu_types": ["H100"], "max_run_s": 3.0, "priorities": ["NORMAL"]}),
        ("policy.attach", "llm", {"kind": "user", "name": "alice"}),
        ("policy.attach", "llm", {"kind": "team", "name": "search"}),
        ("policy.detach", "llm", {"kind": "team", "name": "search"}),
        ("policy.detach", "llm", {"kind": "user", "name": "alice"}),
        ("policy.delete", "llm", {}),
    ]


@pytest.mark.parametrize(
    ("verb", "name", "whom", "error", "says"),
    [
        ("attach", "none", "user alice", NotFound, "there is no policy 'none'"),
        ("attach", "llm", "user carol", NotFound, "no user or service 'carol'"),
        ("attach", "llm", "team alice", NotFound, "no team 'alice'"),
        ("attach", "llm", "service alice", InvalidValue, "alice is a user"),
        ("attach", "llm", "group alice", InvalidValue, "cannot be attached to a 'group'"),
        ("detach", "llm", "user alice", NotFound, "'llm' is not attached to user 'alice'"),
        ("detach", "none", "user alice", NotFound, "there is no policy 'none'"),
    ],
)
def test_what_cannot_be_attached_is_refused(
    services: Services, verb: str, name: str, whom: str, error: type[ServerlessGpuError], says: str
) -> None:
    put(services, "llm")
    with pytest.raises(error, match=says):
        getattr(services.policies, verb)(ROOT, name, *whom.split())
    assert [action for action, *_ in written(services)] == ["policy.set"]


@pytest.mark.parametrize(
    ("name", "said", "error", "says"),
    [
        ("", {}, InvalidValue, "cannot be named"),
        (" a", {}, InvalidValue, "cannot be named"),
        ("a\nb", {}, InvalidValue, "named"),
        ("a\u202eb", {}, InvalidValue, "named"),
        ("p", {"pool": "none"}, InvalidValue, "no pool 'none'"),
        ("p", {"pools": ("none",)}, InvalidValue, "no pool 'none'"),
        ("p", {"gpu_types": ("H1OO",)}, UnknownGpuType, "no GPU type 'H1OO'"),
        ("p", {"gpu_types": ("H100", "H100")}, InvalidValue, "GPU types twice"),
        ("p", {"gpu_types": tuple(f"T{n}" for n in range(101))}, InvalidValue, "over the limit of 100"),
        ("p", {"gpus_per_run": 0}, InvalidValue, "GPUs of a run must be between"),
        ("p", {"gpus_at_once": 10**9}, InvalidValue, "GPUs at once must be between"),
        ("p", {"max_run_s": 0.5}, InvalidValue, "the longest run"),
        ("p", {"max_run_s": float("nan")}, InvalidValue, "the longest run"),
        ("p", {"idle_s": 0.0}, InvalidValue, "idle time must be 1.0 s to 3660 days"),
        ("p", {"required_tags": {"a=b": ()}}, InvalidValue, "the tag key 'a=b'"),
        ("p", {"default_tags": {"": "x"}}, InvalidValue, "the tag key ''"),
        ("p", {"default_tags": {"a": "\x1b[31m"}}, InvalidValue, "control characters"),
        ("p", {"required_tags": {"a": tuple(map(str, range(101)))}}, InvalidValue, "over the limit of 100"),
        ("p", {"default_tags": {f"k{n}": "x" for n in range(65)}}, InvalidValue, "64 tags at most"),
        (
            "p",
            {"default_tags": {"team": "c"}, "required_tags": {"team": ("a", "b")}},
            InvalidValue,
            "adds the tag team=c, but does not accept this value",
        ),
        ("p", {"environments": ("0" * 64,)}, InvalidValue, "no captured environment '000"),
        ("p", {"environments": ("3f9c",)}, InvalidValue, "no captured environment '3f9c' on the server"),
        ("p", {"environments": ("0" * 64,) * 17}, InvalidValue, "16 environments at most"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(
    services: Services, name: str, said: dict[str, Any], error: type[ServerlessGpuError], says: str
) -> None:
    with pytest.raises(error, match=says):
        put(services, name, **said)
    assert services.policies.view_all(ROOT) == () and written(services) == []


def test_a_type_that_a_node_has_may_be_named_though_no_catalogue_has_it(services: Services) -> None:
    device = msgspec.structs.replace(hello().devices[0], type="ACME X1")
    services.agents.hello(NODE, hello(devices=(device,)))
    put(services, "acme", gpu_types=("ACME X1",))


def test_members_see_policies_and_of_those_they_are_attached_to_themselves_and_their_teams(services: Services) -> None:
    put(services, "llm")
    put(services, "free")
    for kind, holder in (("user", "alice"), ("user", "bob"), ("team", "search"), ("team", "ads")):
        attach(services, "llm", kind, holder)
    for who, seen in ((ROOT, 4), (ALICE, 3), (BOB, 1)):
        assert [len(each.holders) for each in services.policies.view_all(who)] == [0, seen]
        assert len(services.policies.view(who, "llm").holders) == seen
    # What one's own runs can be under: what is attached, else what is attached to nobody.
    for who, mine in ((ROOT, ["free"]), (BOB, ["llm"])):
        assert [each.name for each in services.policies.view_all(who, mine=True)] == mine
    with pytest.raises(NotFound, match="no policy 'none'"):
        services.policies.view(ROOT, "none")


# --- runs under them --------------------------------------------------------------------------------------------------


def test_a_run_goes_where_its_policy_says_unless_it_names_a_pool(services: Services) -> None:
    for name in ("slow", "fast"):
        services.pools.put(ROOT, name, PoolRequest())
    put(services, "nightly", pool="slow")
    put(services, "plain")
    asked = request(policy="nightly")
    view = services.submissions.submit(ALICE, asked)
    assert (view.pool, view.spec.pool, view.spec.policy) == ("slow", None, "nightly")
    assert services.submissions.submit(ALICE, request(policy="nightly", pool="fast")).pool == "fast"
    assert services.submissions.submit(ALICE, request(policy="plain")).pool == ""
    put(services, "nightly", pool="fast")
    again = services.submissions.submit(ALICE, asked)
    assert again.deduplicated and again.pool == "slow"
    assert services.submissions.submit(ALICE, request(policy="nightly")).pool == "fast"


def test_a_policy_that_is_not_there_is_refused_with_those_there_are(services: Services) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("server.attaching.policy-nigthly"))) as caught:
        services.submissions.submit(ALICE, request(policy="nigthly"))
    assert caught.value.hint == "policies: none"
    put(services, "nightly")
    with pytest.raises(InvalidValue) as caught:
        services.submissions.submit(ALICE, request(policy="nigthly"))
    assert caught.value.hint == "policies: nightly"
    services.policies.delete(ROOT, "nightly")
    with pytest.raises(NotFound, match=re.escape(golden("server.attaching.policy"))):
        services.policies.delete(ROOT, "nightly")


def test_what_is_written_down_is_the_run_as_it_is_under_its_policy(services: Services) -> None:
    put(
        services,
        "llm",
        default_tags={"cost": "42"},
        gpu_types=("H100", "A10"),
        gpus_per_run=4,
        max_run_s=60.0,
        idle_s=30.0,
        priorities=(Priority.BEST_EFFORT,),
    )
    attach(services, "llm", "team", "search")
    run = stored(services, ALICE, team="search", tags={"a": "b"}, resources=Resources(gpus=2))
    spec = run.spec
    assert (spec.policy, spec.tags) == ("llm", {"a": "b", "cost": "42"})
    assert (spec.max_run_s, spec.idle_timeout_s, spec.resources.gpu_type) == (60.0, 30.0, "H100")
    assert run.priority == tuple(Priority).index(Priority.BEST_EFFORT)
    # For another team, or for somebody else, it says nothing.
    assert stored(services, ALICE, team="ads").spec.policy is None
    assert stored(services, BOB).spec.policy is None
    with pytest.raises(PolicyViolation, match=re.escape(golden("server.attaching.llm-does-accept"))) as caught:
        services.submissions.submit(ALICE, request(resources=Resources(gpus=8)))
    assert caught.value.hint == golden("server.attaching.accepts-gpus-most")


def test_the_same_request_is_the_same_run_whatever_its_policy_says_by_now(services: Services) -> None:
    asked = request(resources=Resources(gpus=8))
    services.submissions.submit(BOB, asked)
    put(services, "llm", gpus_per_run=4)
    attach(services, "llm", "user", "bob")
    assert services.submissions.submit(BOB, asked).deduplicated
    with pytest.raises(PolicyViolation):
        services.submissions.submit(BOB, request(resources=Resources(gpus=8)))


def test_a_service_has_policies_as_users_have(services: Services) -> None:
    services.principals.make(ROOT, PrincipalRequest(name="ci", kind="service"))
    put(services, "batch", default_tags={"by": "ci"})
    attach(services, "batch", "service", "ci")
    run = stored(services, Caller(name="ci", kind="service", role="member"))
    assert run.spec.policy == "batch" and run.spec.tags == {"by": "ci"}


def test_an_estimate_is_refused_as_the_run_would_be(services: Services) -> None:
    put(services, "llm", gpus_per_run=4)
    attach(services, "llm", "user", "bob")
    asked = EstimateRequest(spec=request(resources=Resources(gpus=8)).spec, target=LIVE)
    with pytest.raises(PolicyViolation, match="gpus=8"):
        services.estimates.make(BOB, asked)


def test_of_several_types_a_run_gets_one_that_its_pool_has(services: Services) -> None:
    services.pools.put(ROOT, "gold", PoolRequest(kind="reserved"))
    services.agents.hello(NODE, hello())  # eight H100, in the on-demand pool
    put(services, "p", gpu_types=("L4", "A100", "H100"))
    attach(services, "p", "user", "bob")
    assert stored(services, BOB).spec.resources.gpu_type == "H100"
    assert stored(services, BOB, pool="gold", wait=True).spec.resources.gpu_type == "L4"  # which has none of them


def environment(*packages: str, code: str = "c") -> Snapshot:
    own = tuple(
        SnapshotMember(address=f"{number:064x}", kind="distribution", name=name, version="1", modules=(name,))
        for number, name in enumerate(packages, start=1)
    )
    mine = (SnapshotMember(address=code.encode().hex().zfill(64), kind="code", name="proj"),)
    return make_snapshot(PYTHON, (Root(kind="own", members=own), Root(kind="code", members=mine)), SnapshotOrigin())


def test_what_is_installed_is_as_in_a_named_environment_and_the_code_may_differ(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, own_code, more = environment("torch"), environment("torch", code="d"), environment("torch", "evil")
    for snapshot in (base, own_code, more):
        services.environments.put(f"snapshots/{snapshot.address}", encode(snapshot))
    put(services, "base", environments=(base.address,))
    attach(services, "base", "user", "bob")
    assert stored(services, BOB, snapshot=own_code.address).snapshot == own_code.address
    monkeypatch.setattr(services.environments, "_store", None)  # what was read is remembered
    assert stored(services, BOB, snapshot=own_code.address).snapshot == own_code.address
    monkeypatch.undo()
    with pytest.raises(PolicyViolation, match=golden("server.attaching.base-does-accept")) as caught:
        services.submissions.submit(BOB, request(snapshot=more.address))
    assert caught.value.hint == golden("server.attaching.accepts-installed-your", address=base.address[:12])
    with pytest.raises(PolicyViolation, match=re.escape(golden("server.attaching.import-lie"))):
        services.submissions.submit(BOB, request())
    # It stays in the store for as long as a policy names it.
    late_ns = services.clock.wall_ns() * 2
    in_use = services.database.read(lambda connection: runs.snapshots_in_use(connection, since_ns=late_ns))
    assert base.address in in_use
    services.environments.delete([f"snapshots/{base.address}"])
    services.environments._packages.clear()
    with pytest.raises(PolicyViolation, match=re.escape(golden("server.attaching.none-them-store"))):
        services.submissions.submit(BOB, request(snapshot=own_code.address))


# --- at once ----------------------------------------------------------------------------------------------------------


def states(services: Services, ids: list[str]) -> list[State]:
    found = services.database.read(lambda connection: runs.find_many(connection, ids))
    by_id = {run.id: run.state for run in found}
    return [by_id[run_id] for run_id in ids]


def test_what_is_over_a_cap_waits_beside_the_line_and_is_told_why(services: Services, clock: FakeClock) -> None:
    services.agents.hello(NODE, hello())
    put(services, "p", gpus_at_once=4)
    attach(services, "p", "user", "bob")
    scheduler = make_scheduler(services)
    ids = []
    for gpus in (2, 2, 2):
        ids.append(stored(services, BOB, resources=Resources(gpus=gpus, gpu_type="H100")).id)
        clock.advance(1)
    others = stored(services, ALICE, resources=Resources(gpus=2, gpu_type="H100")).id
    scheduler.tick(clock.boottime_ns())
    assert states(services, [*ids, others]) == [State.STARTING, State.STARTING, State.QUEUED, State.STARTING]
    scheduler.tick(clock.boottime_ns())
    wait = services.sentences.wait(ids[2])
    assert wait is not None and wait.reason is WaitReason.HELD
    assert services.sentences.told(ids[2]).sentence == golden("server.attaching.usage-policy-allows")
    asked = EstimateRequest(spec=request(resources=Resources(gpus=2, gpu_type="H100")).spec, target=LIVE)
    assert services.estimates.make(BOB, asked).basis == services.sentences.told(ids[2]).sentence
    # More is allowed: the bell rings, and it starts.
    put(services, "p", gpus_at_once=6)
    scheduler.tick(clock.boottime_ns())
    assert states(services, ids[2:]) == [State.STARTING]


def test_two_that_want_different_devices_are_not_both_placed_where_there_is_room_for_one(
    services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = hello().devices
    other = tuple(msgspec.structs.replace(one, type="A10", uuid=f"A{one.index}") for one in devices)
    services.agents.hello(NODE, hello(devices=(*devices, *other)))
    put(services, "p", gpus_at_once=4)
    attach(services, "p", "user", "bob")
    ids = [stored(services, BOB, resources=Resources(gpus=4, gpu_type=kind)).id for kind in ("H100", "A10")]
    scheduler = make_scheduler(services)
    scheduler.tick(clock.boottime_ns())
    assert sorted(states(services, ids)) == [State.QUEUED, State.STARTING]
    scheduler.tick(clock.boottime_ns())
    assert sorted(states(services, ids)) == [State.QUEUED, State.STARTING]


def test_what_was_decided_and_is_not_written_yet_counts(services: Services, clock: FakeClock) -> None:
    services.agents.hello(NODE, hello())
    put(services, "p", gpus_at_once=4, priorities=tuple(Priority))
    attach(services, "p", "user", "bob")
    first = stored(services, BOB, priority=Priority.NORMAL, resources=Resources(gpus=4, gpu_type="H100"))
    planning = make_planning(services)
    planning.tell(planning.read())
    assert [one.run_id for one in planning.decide().placements] == [first.id]
    urgent = stored(services, BOB, priority=Priority.CRITICAL, resources=Resources(gpus=4, gpu_type="H100"))
    reading = planning.read()
    assert "4 are in use" in reading.waiting[urgent.id].held and not reading.waiting[first.id].held


def test_a_node_that_knows_no_longest_run_is_told_a_timeout(services: Services, clock: FakeClock) -> None:
    agents = services.agents
    put(services, "p", max_run_s=3.0)
    attach(services, "p", "user", "bob")
    for takes, timeout_s in (((), 3.0), (("max_run",), None)):
        node = agents.hello(NODE, hello(takes=takes)).node
        run = stored(services, BOB, resources=Resources(gpus=1, gpu_type="H100"))
        make_scheduler(services).tick(clock.boottime_ns())
        (order,) = [one for one in agents.waiting(NODE, node) if isinstance(one, Start) and one.run_id == run.id]
        assert (order.spec.timeout_s, order.spec.max_run_s) == (timeout_s, 3.0)


# --- D7: a default time limit, a default or compulsory team ----------------------------------------------------------


def test_22D7_a_run_gets_the_time_limit_and_the_team_of_its_policy(services: Services) -> None:
    put(services, "p", timeout_s=3600.0, team="ads")
    attach(services, "p", "user", "alice")
    spec = stored(services, ALICE).spec
    assert (spec.timeout_s, spec.team, spec.policy) == (3600.0, "ads", "p")


def test_22D7_a_run_without_the_team_that_its_policy_requires_is_refused(services: Services) -> None:
    put(services, "p", team_required=True)
    attach(services, "p", "user", "alice")
    attach(services, "p", "user", "bob")
    for who, hint in (
        (ALICE, "set team= to one of: ads, search"),
        (BOB, "an operator can add you: sgpu team join TEAM USER"),
    ):
        with pytest.raises(
            PolicyViolation, match=re.escape(golden("server.attaching.usage-policy-requires"))
        ) as refused:
            stored(services, who)
        assert refused.value.hint == hint
    one = Caller(name="alice", role="member", teams=("search",))
    assert stored(services, one).spec.team == "search"


def test_22D7_a_policy_names_no_team_that_is_not_there(services: Services) -> None:
    with pytest.raises(NotFound, match=re.escape(golden("server.attaching.team-nowhere"))):
        put(services, "p", team="nowhere")


# --- several at once, and who may be CRITICAL -------------------------------------------------------------------------


def test_22D3_a_mandatory_policy_applies_beside_the_one_that_a_run_names(services: Services, clock: FakeClock) -> None:
    services.agents.hello(NODE, hello())
    put(services, "loose", gpus_per_run=8)
    put(services, "free", default_tags={"a": "b"})
    put(services, "house", mandatory=True, gpus_per_run=4, max_run_s=60.0, required_tags={"cost": ()})
    attach(services, "loose", "user", "alice")
    attach(services, "house", "team", "ads")
    eight = Resources(gpus=8, gpu_type="H100")
    for named in (None, "loose", "house"):  # also a run for no team: it is in that team
        with pytest.raises(PolicyViolation, match=golden("server.attaching.usage-policy-house")):
            services.submissions.submit(ALICE, request(policy=named, resources=eight))
    one: dict[str, Any] = {"tags": {"cost": "1"}, "resources": Resources(gpus=1, gpu_type="H100")}
    run = stored(services, ALICE, **one)
    assert (run.spec.policy, run.spec.policies, run.spec.max_run_s) == ("loose", ("house",), 60.0)
    other = stored(services, ALICE, team="search", resources=eight)
    assert (other.spec.policy, other.spec.policies) == ("loose", ())
    services.policies.detach(ROOT, "loose", "user", "alice")
    only = stored(services, ALICE, team="ads", **one)
    assert (only.spec.policy, only.spec.policies) == ("house", ())
    chosen = stored(services, ALICE, policy="free", team="ads", **one)
    assert (chosen.spec.policy, chosen.spec.policies) == ("free", ("house",))


def test_22D3_the_cap_of_a_mandatory_policy_holds_whatever_else_runs_name(services: Services, clock: FakeClock) -> None:
    services.agents.hello(NODE, hello())
    put(services, "house", mandatory=True, gpus_at_once=4)
    attach(services, "house", "user", "bob")
    for name in ("x", "y"):
        put(services, name)
        attach(services, name, "user", "bob")
    four = Resources(gpus=4, gpu_type="H100")
    ids = [stored(services, BOB, policy=name, resources=four).id for name in ("x", "y")]
    scheduler = make_scheduler(services)
    for _ in range(2):
        scheduler.tick(clock.boottime_ns())
        assert sorted(states(services, ids)) == [State.QUEUED, State.STARTING]
        clock.advance(1)
    assert golden("server.attaching.usage-policy-house-allows") in services.sentences.of(ids[1])


def test_22D3_what_comes_with_a_request_is_no_policy(services: Services) -> None:
    run = stored(services, BOB, policies=("made-up",), attempts_max=1000, unsaved_max=1000, total_run_s=1e9)
    spec = run.spec
    assert (spec.policy, spec.policies, spec.attempts_max, spec.total_run_s) == (None, (), None, None)
    assert spec.unsaved_max == UNSAVED_MAX


def test_22D2_a_policy_bounds_attempts_and_the_time_of_all(services: Services) -> None:
    put(services, "p", attempts_max=5, total_run_s=3600.0, unsaved_max=2)
    attach(services, "p", "user", "bob")
    spec = stored(services, BOB, resume=True).spec
    assert (spec.attempts_max, spec.total_run_s, spec.unsaved_max) == (5, 3600.0, 2)
    for said in ({"attempts_max": 0}, {"unsaved_max": 0}, {"total_run_s": 0.5}, {"total_run_s": float("nan")}):
        with pytest.raises(InvalidValue):
            put(services, "q", **said)


def test_22D4_critical_is_granted_by_role_or_by_an_attached_policy(services: Services) -> None:
    operator = Caller(name="root", role="operator")
    put(services, "urgent", priorities=tuple(Priority))
    for who, named in ((BOB, None), (ALICE, "urgent")):  # attached to nobody, a policy grants nothing
        with pytest.raises(PolicyViolation, match=golden("server.attaching.priority-critical-granted")):
            services.submissions.submit(who, request(policy=named, priority=Priority.CRITICAL))
        assert stored(services, who, policy=named, priority=Priority.BEST_EFFORT).priority == 2
    assert stored(services, operator, priority=Priority.CRITICAL).priority == 0
    attach(services, "urgent", "user", "bob")
    assert stored(services, BOB, priority=Priority.CRITICAL).priority == 0
