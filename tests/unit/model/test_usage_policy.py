"""Usage policies: which one a run is under, what it accepts, and what a run gets from it."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serverless_gpu.errors import PolicyViolation
from serverless_gpu.model import hardware, usage_policy
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX
from serverless_gpu.model.spec import TAGS_MAX, Priority, Resources, RunSpec
from serverless_gpu.model.usage_policy import MAX_RUN_S, Attached, NamedPolicy, UsagePolicy, choose, describe
from serverless_gpu.wire import access
from tests.support.golden import golden

HOUR = 3600.0
NORMAL, BEST_EFFORT, CRITICAL = Priority.NORMAL, Priority.BEST_EFFORT, Priority.CRITICAL


def spec(**said: Any) -> RunSpec:
    gpus, gpu_type = said.pop("gpus", 1), said.pop("gpu_type", None)
    return RunSpec(remote=True, resources=Resources(gpus=gpus, gpu_type=gpu_type), **said)


def apply(name: str, said: UsagePolicy, asked: RunSpec, **given: Any) -> RunSpec:
    """Return a run under one policy, or none, of somebody who may use each class."""
    return usage_policy.apply([NamedPolicy(name, said)] if name else [], asked, may_be_critical=True, **given)


def where(said: UsagePolicy, asked: RunSpec) -> str:
    return usage_policy.where([NamedPolicy("p", said)], asked)


# --- which one --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attached", "named", "team", "is_free", "chosen"),
    [
        (Attached(), None, "", False, ""),
        (Attached(own=("a",)), None, "", False, "a"),
        (Attached(own=("a",)), "a", "", False, "a"),
        (Attached(teams={"search": ("s",)}), None, "", False, "s"),
        (Attached(own=("a",), teams={"search": ("a",)}), None, "", False, "a"),  # the same one, twice
        (Attached(own=("a", "b")), "b", "", False, "b"),
        # A run for a team is under that team's policies and its owner's own.
        (Attached(teams={"search": ("s",), "ads": ("t",)}), None, "ads", False, "t"),
        (Attached(teams={"search": ("s",)}), None, "ads", False, ""),
        (Attached(own=("a",), teams={"search": ("s",)}), "s", "search", False, "s"),
        # What is attached to nobody may be named by whoever has none.
        (Attached(), "free", "", True, "free"),
    ],
)
def test_one_applies_by_itself_and_of_several_the_run_says_which(
    attached: Attached, named: str | None, team: str, is_free: bool, chosen: str
) -> None:
    assert choose(attached, who="alice", named=named, team=team, is_free=is_free) == chosen


@pytest.mark.parametrize(
    ("attached", "named", "team", "is_free", "says", "hint"),
    [
        (Attached(own=("b", "a")), None, "", False, "2 usage policies apply to this run of alice", "SGPU_POLICY"),
        (Attached(own=("b", "a")), None, "", False, "selects none of them", ": a, b"),
        (Attached(own=("a",), teams={"search": ("s",)}), None, "search", False, "2 usage policies", ": a, s"),
        (Attached(teams={"search": ("s",), "ads": ("t",)}), None, "", False, "2 usage policies", ": s, t"),
        # Whoever has one cannot leave it for one that is attached to nobody, or to others.
        (Attached(own=("a",)), "free", "", True, "'free' does not apply to runs of alice", ": a"),
        (Attached(), "theirs", "", False, "'theirs' does not apply to runs of alice", "sgpu policy attach theirs"),
        (Attached(teams={"search": ("s",)}), "s", "ads", False, "alice's runs for team 'ads'", "attach s"),
    ],
)
def test_what_is_not_said_or_not_theirs_is_refused(
    attached: Attached, named: str | None, team: str, is_free: bool, says: str, hint: str
) -> None:
    with pytest.raises(PolicyViolation) as caught:
        choose(attached, who="alice", named=named, team=team, is_free=is_free)
    assert says in caught.value.message and hint in caught.value.hint


# --- what it accepts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "asked", "refused", "accepted"),
    [
        ({"required_tags": {"team": ()}}, {}, "a run without the tag 'team'", "tags={'team': ...}"),
        (
            {"required_tags": {"team": ("a", "b")}},
            {"tags": {"team": "A"}},
            "the tag 'team' with 'A'",
            "tags={'team': 'a', 'b'}",
        ),
        ({"gpu_types": ("H100", "A10")}, {"gpu_type": "L4"}, "gpu_type='L4'", "GPU types H100, A10"),
        ({"gpu_types": ("A100-40",)}, {"gpu_type": "A100-80"}, "gpu_type='A100-80'", "GPU types A100-40"),
        ({"gpus_per_run": 4}, {"gpus": 8}, "gpus=8", "gpus=4 at most"),
        ({"gpus_per_run": 4}, {"gpus": None}, "every GPU of a node", "gpus=4 at most"),
        ({"gpus_at_once": 2, "gpus_per_run": 4}, {"gpus": 3}, "gpus=3", "gpus=2 at most"),
        ({"pool": "slow", "pools": ("fast",)}, {"pool": "gold"}, "pool='gold'", "pools slow, fast"),
        ({"idle_s": 600.0}, {"idle_timeout_s": 601.0}, "idle_timeout=601", "idle_timeout up to 600"),
        ({"priorities": (BEST_EFFORT,)}, {"priority": CRITICAL}, "priority='CRITICAL'", "classes BEST_EFFORT"),
        ({"environments": ("0" * 64,)}, {"environment": "live"}, "files in place", "env='snapshot'"),
        (
            {"default_tags": {f"d{n}": "x" for n in range(TAGS_MAX)}},
            {"tags": {"mine": "y"}},
            f"{TAGS_MAX + 1} tags",
            f"{TAGS_MAX} altogether",
        ),
    ],
)
def test_a_violation_names_the_policy_what_is_not_accepted_and_what_would_be(
    said: dict[str, Any], asked: dict[str, Any], refused: str, accepted: str
) -> None:
    with pytest.raises(PolicyViolation, match=golden("model.policy.usage-policy-llm")) as caught:
        apply("llm", UsagePolicy(**said), spec(**asked))
    assert refused in caught.value.message
    assert caught.value.hint.startswith("it accepts ") and accepted in caught.value.hint


def test_all_that_is_not_accepted_is_said_at_once() -> None:
    with pytest.raises(PolicyViolation) as caught:
        apply("llm", UsagePolicy(gpus_per_run=4, gpu_types=("H100",)), spec(gpus=8, gpu_type="A10"))
    assert caught.value.message == golden("model.policy.usage-policy-llm-does")
    assert caught.value.hint == golden("model.policy.accepts-gpu-types")


@pytest.mark.parametrize(
    ("said", "asked", "got"),
    [
        ({}, {}, {}),
        ({"default_tags": {"team": "a", "cost": "1"}}, {"tags": {"team": "b"}}, {"tags": {"team": "b", "cost": "1"}}),
        ({"default_tags": {"team": "a"}, "required_tags": {"team": ("a",)}}, {}, {"tags": {"team": "a"}}),
        ({"gpu_types": ("H100", "A10")}, {}, {"gpu_type": "H100"}),
        ({"gpu_types": ("H100", "A10")}, {"gpu_type": "A10"}, {"gpu_type": "A10"}),
        ({"gpu_types": ("A100",)}, {"gpu_type": "A100-80"}, {"gpu_type": "A100-80"}),  # a family accepts its members
        ({"gpu_types": ("A100-80",)}, {"gpu_type": "A100"}, {"gpu_type": "A100-80"}),  # what was left open
        ({"gpus_per_run": 4}, {"gpus": 4}, {}),
        ({"pools": ("fast",)}, {"pool": "fast"}, {"pool": "fast"}),
        ({"pool": "slow"}, {"pool": "gold"}, {"pool": "gold"}),  # it only says where runs go that name none
        ({"idle_s": 600.0}, {}, {"idle_timeout_s": 600.0}),
        ({"idle_s": 600.0}, {"idle_timeout_s": 60.0}, {"idle_timeout_s": 60.0}),
        ({"priorities": (BEST_EFFORT, NORMAL)}, {}, {"priority": NORMAL}),
        ({"priorities": (BEST_EFFORT, CRITICAL)}, {}, {"priority": BEST_EFFORT}),
        ({"max_run_s": 2 * HOUR}, {}, {"max_run_s": 2 * HOUR}),
        ({"max_run_s": 30 * 24 * HOUR}, {}, {"max_run_s": 30 * 24 * HOUR}),  # a policy may allow more than the server
        ({"max_run_s": 2 * HOUR}, {"max_run_s": HOUR}, {"max_run_s": HOUR}),
        ({"environments": ("0" * 64,)}, {"environment": "snapshot"}, {"environment": "snapshot"}),
    ],
)
def test_a_run_gets_what_it_left_open_and_keeps_what_it_said(
    said: dict[str, Any], asked: dict[str, Any], got: dict[str, Any]
) -> None:
    before = spec(**asked)
    after = apply("llm", UsagePolicy(**said), before)
    usual = {"policy": "llm", "max_run_s": MAX_RUN_S}
    if "gpu_type" in got:
        usual["resources"] = msgspec.structs.replace(before.resources, gpu_type=got.pop("gpu_type"))
    assert after == msgspec.structs.replace(before, **(usual | got))


def test_a_run_under_no_policy_has_a_longest_time_and_nothing_else() -> None:
    asked = spec(gpus=None, tags={"a": "b"})
    assert apply("", UsagePolicy(), asked) == msgspec.structs.replace(asked, max_run_s=MAX_RUN_S)
    assert apply("", UsagePolicy(), asked, max_run_s=None) == asked


@pytest.mark.parametrize(
    ("types", "asked", "present", "got"),
    [
        (("H100", "A10"), None, {"A10", "L4"}, "A10"),
        (("H100", "A10"), None, {"A10", "H100"}, "H100"),
        (("H100", "A10"), None, {"L4"}, "H100"),
        (("A100", "A10"), None, {"A100-40"}, "A100"),
        (("A100-40", "A100-80"), "A100", {"A100-80"}, "A100-80"),
    ],
)
def test_who_asks_for_no_type_gets_the_first_that_there_is(
    types: tuple[str, ...], asked: str | None, present: set[str], got: str
) -> None:
    assert apply("p", UsagePolicy(gpu_types=types), spec(gpu_type=asked), present=present).resources.gpu_type == got


@pytest.mark.parametrize(
    ("said", "pool", "goes"),
    [
        ({}, None, ""),
        ({"pool": "slow"}, None, "slow"),
        ({"pools": ("fast", "slow")}, None, "fast"),
        ({"pool": "slow", "pools": ("fast",)}, None, "slow"),
        ({"pool": "slow"}, "gold", "gold"),
    ],
)
def test_a_run_goes_where_it_says_else_where_its_policy_says(said: dict[str, Any], pool: str | None, goes: str) -> None:
    assert where(UsagePolicy(**said), spec(pool=pool)) == goes


def test_a_timeout_beyond_the_longest_run_is_no_violation_and_the_smaller_holds() -> None:
    after = apply("p", UsagePolicy(max_run_s=HOUR), spec(timeout_s=2 * HOUR))
    assert (after.timeout_s, after.limit_s, after.is_capped) == (2 * HOUR, HOUR, True)
    assert after.limits().timeout_ns == round(HOUR * 1e9)
    for timeout_s in (HOUR / 2, HOUR):
        after = apply("p", UsagePolicy(max_run_s=HOUR), spec(timeout_s=timeout_s))
        assert (after.limit_s, after.is_capped) == (timeout_s, False)
    assert spec().limits().timeout_ns is None and not spec().is_capped


# --- whatever a policy says -------------------------------------------------------------------------------------------

TYPES = ("H100", "A10", "A100", "A100-40", "A100-80", "L4")
KEYS = st.sampled_from(["team", "cost", "x"])
SECONDS = st.floats(1.0, 1e6)


@st.composite
def policies(draw: st.DrawFn) -> UsagePolicy:
    return UsagePolicy(
        pool=draw(st.sampled_from(["", "slow"])),
        pools=draw(st.lists(st.sampled_from(["slow", "fast"]), unique=True).map(tuple)),
        required_tags=draw(st.dictionaries(KEYS, st.lists(st.sampled_from("ab"), unique=True).map(tuple))),
        default_tags=draw(st.dictionaries(KEYS, st.sampled_from("abc"))),
        gpu_types=draw(st.lists(st.sampled_from(TYPES), unique=True).map(tuple)),
        gpus_per_run=draw(st.none() | st.integers(1, 9)),
        gpus_at_once=draw(st.none() | st.integers(1, 9)),
        max_run_s=draw(st.none() | SECONDS),
        idle_s=draw(st.none() | SECONDS),
        priorities=draw(st.lists(st.sampled_from(Priority), unique=True).map(tuple)),
        environments=draw(st.sampled_from([(), ("0" * 64,)])),
        attempts_max=draw(st.none() | st.integers(1, 9)),
        total_run_s=draw(st.none() | SECONDS),
        unsaved_max=draw(st.none() | st.integers(1, 9)),
        mandatory=draw(st.booleans()),
    )


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    return spec(
        gpus=draw(st.none() | st.integers(1, 10)),
        gpu_type=draw(st.none() | st.sampled_from(TYPES)),
        pool=draw(st.sampled_from([None, "slow", "fast", "gold"])),
        tags=draw(st.dictionaries(KEYS, st.sampled_from("abc"))),
        timeout_s=draw(st.none() | SECONDS),
        idle_timeout_s=draw(st.none() | SECONDS),
        priority=draw(st.sampled_from(Priority)),
        environment=draw(st.sampled_from(["live", "snapshot"])),
    )


@given(said=policies(), asked=specs(), present=st.sets(st.sampled_from(TYPES)))
def test_what_comes_out_is_within_the_policy_and_once_more_changes_nothing(
    said: UsagePolicy, asked: RunSpec, present: set[str]
) -> None:
    try:
        got = apply("p", said, asked, present=present)
    except PolicyViolation:
        return
    most = [cap for cap in (said.gpus_per_run, said.gpus_at_once) if cap is not None]
    gpus, gpu_type = got.resources.gpus, got.resources.gpu_type
    assert not most or (gpus is not None and gpus <= min(most))
    assert not said.gpu_types or any(hardware.matches(kind, gpu_type or "") for kind in said.gpu_types)
    for key, values in said.required_tags.items():
        assert key in got.tags and (not values or got.tags[key] in values)
    assert said.default_tags.keys() <= got.tags.keys()
    assert said.idle_s is None or (got.idle_timeout_s is not None and got.idle_timeout_s <= said.idle_s)
    assert got.max_run_s is not None and got.max_run_s <= (said.max_run_s or MAX_RUN_S)
    assert not said.priorities or got.priority in said.priorities
    assert not said.pools or where(said, got) in (*said.pools, said.pool)
    assert not said.environments or got.environment == "snapshot"
    assert apply("p", said, got, present=present) == got
    assert (got.attempts_max, got.total_run_s) == (said.attempts_max, said.total_run_s)
    assert got.unsaved_max == (UNSAVED_MAX if said.unsaved_max is None else said.unsaved_max)
    # Nothing that was said is loosened.
    assert asked.tags.items() <= got.tags.items() and got.resources.gpus == asked.resources.gpus
    assert asked.idle_timeout_s is None or (got.idle_timeout_s or 0) <= asked.idle_timeout_s
    assert got.timeout_s == asked.timeout_s and got.pool == asked.pool


def test_a_policy_is_said_in_words() -> None:
    assert describe(UsagePolicy()) == ["any on-demand pool"]
    full = UsagePolicy(
        pools=("fast", "slow"),
        required_tags={"team": ("a", "b"), "cost": ()},
        default_tags={"x": "y"},
        gpu_types=("H100",),
        gpus_per_run=4,
        gpus_at_once=8,
        max_run_s=7 * 86_400.0,
        idle_s=1800.0,
        priorities=(BEST_EFFORT,),
        environments=("ab" * 32,),
    )
    assert describe(full) == [
        "pool fast",
        "pools fast, slow",
        golden("model.policy.needs-tag-team"),
        "needs tag cost",
        "adds tag x=y",
        "GPU types H100",
        "4 GPUs a run",
        "8 GPUs at once",
        golden("model.policy.days-time"),
        golden("model.policy.stopped-after-30"),
        "classes BEST_EFFORT",
        "packages of abababababab",
    ]
    assert usage_policy.format_span(90.0) == "1 min 30 s"


def test_what_travels_has_every_field_of_a_policy() -> None:
    full = UsagePolicy(pool="a", gpu_types=("H100",), required_tags={"t": ("x",)}, max_run_s=3.0)
    assert access.policy_of(access.request_of(full)) == access.policy_of(access.view_of("p", full)) == full
    assert access.PolicyRequest.__struct_fields__ == UsagePolicy.__struct_fields__


# --- several at once --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "named", "chosen"),
    [
        (("a", "must"), None, "a"),  # of those that are not mandatory there is one
        (("must", "must-2"), None, ""),
        (("a", "must"), "must", "a"),  # naming a mandatory one is no way out of another
        (("a", "b", "must"), "b", "b"),
        (("must",), "free", "free"),
    ],
)
def test_22D3_a_mandatory_policy_is_none_to_choose(own: tuple[str, ...], named: str | None, chosen: str) -> None:
    attached = Attached(own=own)
    assert choose(attached, who="al", named=named, is_free=named == "free", mandatory={"must", "must-2"}) == chosen


def test_22D3_who_has_two_to_choose_from_says_which_and_cannot_name_a_mandatory_one_instead() -> None:
    for named in (None, "must"):
        with pytest.raises(PolicyViolation, match="2 usage policies") as caught:
            choose(Attached(own=("a", "b", "must")), who="al", named=named, mandatory={"must"})
        assert caught.value.hint.endswith(": a, b")


def under(asked: RunSpec, *said: UsagePolicy, **given: Any) -> RunSpec:
    names = [NamedPolicy("abc"[number], each) for number, each in enumerate(said)]
    return usage_policy.apply(names, asked, **({"may_be_critical": True} | given))


@given(first=policies(), second=policies(), asked=specs(), present=st.sets(st.sampled_from(TYPES)))
def test_22D3_what_is_within_several_policies_is_within_each_and_no_limit_is_larger(
    first: UsagePolicy, second: UsagePolicy, asked: RunSpec, present: set[str]
) -> None:
    try:
        got = under(asked, first, second, present=present)
    except PolicyViolation:
        return
    assert (got.policy, got.policies) == ("a", ("b",))
    for said in (first, second):
        alone = usage_policy.apply([NamedPolicy("p", said)], got, max_run_s=None, may_be_critical=True)
        for name in ("tags", "resources", "priority", "idle_timeout_s", "max_run_s"):
            assert getattr(alone, name) == getattr(got, name), name
        for limit in ("max_run_s", "total_run_s", "attempts_max", "unsaved_max"):
            most = getattr(said, limit)
            assert most is None or getattr(got, limit) <= most
        assert not said.pools or usage_policy.where([NamedPolicy("a", first), NamedPolicy("b", second)], got) in (
            *said.pools,
            said.pool,
        )


@given(first=policies(), second=policies(), asked=specs())
def test_22D3_a_second_policy_lets_nothing_through_that_the_first_refuses(
    first: UsagePolicy, second: UsagePolicy, asked: RunSpec
) -> None:
    second = msgspec.structs.replace(second, default_tags={}, gpu_types=(), pool="", pools=(), priorities=())
    try:
        apply("a", first, asked)
    except PolicyViolation:
        with pytest.raises(PolicyViolation):
            under(asked, first, second)


@pytest.mark.parametrize(
    ("first", "second", "asked", "says", "hint"),
    [
        (
            {},
            {"gpus_per_run": 2},
            {"gpus": 4},
            "usage policy 'b' does not accept gpus=4",
            "'b' accepts gpus=2 at most; mandatory: b",
        ),
        (
            {"gpus_per_run": 3},
            {"gpus_per_run": 2, "required_tags": {"cost": ()}},
            {"gpus": 4},
            "usage policy 'a' does not accept gpus=4; usage policy 'b' does not accept a run without the tag 'cost'; "
            "gpus=4",
            "'a' accepts gpus=3 at most; 'b' accepts tags={'cost': ...}; gpus=2 at most; mandatory: b",
        ),
        (
            {"gpu_types": ("A100",)},
            {"gpu_types": ("H100",)},
            {},
            "usage policy 'b' does not accept the GPU types A100",
            "'b' accepts GPU types H100; mandatory: b",
        ),
        (
            {"pool": "slow"},
            {"pools": ("fast",)},
            {"pool": "slow"},
            "usage policy 'b' does not accept pool='slow'",
            "'b' accepts pools fast; mandatory: b",
        ),
        (
            {"priorities": (BEST_EFFORT,)},
            {"priorities": (CRITICAL,)},
            {},
            "usage policy 'a' does not accept priority='NORMAL'; usage policy 'b' does not accept priority='NORMAL'",
            "'a' accepts classes BEST_EFFORT; 'b' accepts classes CRITICAL; mandatory: b",
        ),
    ],
)
def test_22D3_a_refusal_names_the_policy(
    first: dict[str, Any], second: dict[str, Any], asked: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(PolicyViolation) as caught:
        under(spec(**asked), UsagePolicy(**first), UsagePolicy(**second, mandatory=True))
    assert (caught.value.message, caught.value.hint) == (says, hint)


@pytest.mark.parametrize(
    ("first", "second", "asked", "got"),
    [
        ({"max_run_s": HOUR}, {"max_run_s": 2 * HOUR}, {}, {"max_run_s": HOUR}),
        ({"max_run_s": 2 * HOUR}, {"max_run_s": HOUR}, {}, {"max_run_s": HOUR}),
        ({"idle_s": 60.0}, {"idle_s": 30.0}, {}, {"idle_timeout_s": 30.0}),
        ({"attempts_max": 5}, {"attempts_max": 4, "unsaved_max": 9}, {}, {"attempts_max": 4, "unsaved_max": 9}),
        ({"total_run_s": 5.0}, {}, {}, {"total_run_s": 5.0}),
        ({"default_tags": {"t": "a"}}, {"default_tags": {"t": "b", "u": "b"}}, {}, {"tags": {"t": "a", "u": "b"}}),
        ({"priorities": (NORMAL, BEST_EFFORT)}, {"priorities": (BEST_EFFORT,)}, {}, {"priority": BEST_EFFORT}),
    ],
)
def test_22D3_the_strictest_rule_of_all_holds(
    first: dict[str, Any], second: dict[str, Any], asked: dict[str, Any], got: dict[str, Any]
) -> None:
    found = under(spec(**asked), UsagePolicy(**first), UsagePolicy(**second))
    assert {name: getattr(found, name) for name in got} == got


@pytest.mark.parametrize(
    ("first", "second", "asked", "got"),
    [
        (("A100",), ("A100-80", "A100-40"), None, "A100-80"),
        (("A100-40", "A100-80"), ("A100",), "A100", "A100-40"),
        (("H100", "A10"), ("A10", "H100"), None, "H100"),
        (("H100", "A10"), ("A10",), None, "A10"),
    ],
)
def test_22D3_a_run_gets_a_type_that_all_accept(
    first: tuple[str, ...], second: tuple[str, ...], asked: str | None, got: str
) -> None:
    both = UsagePolicy(gpu_types=first), UsagePolicy(gpu_types=second)
    assert under(spec(gpu_type=asked), *both).resources.gpu_type == got


# --- who may be CRITICAL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_role", [False, True])
@pytest.mark.parametrize("asked", list(Priority))
@pytest.mark.parametrize(
    ("said", "grants"),
    [
        ([], False),
        ([NamedPolicy("a", UsagePolicy())], False),
        ([NamedPolicy("a", UsagePolicy(priorities=(NORMAL, CRITICAL, BEST_EFFORT)))], True),
        ([NamedPolicy("a", UsagePolicy(priorities=(NORMAL, CRITICAL, BEST_EFFORT)), is_attached=False)], False),
        ([NamedPolicy("a", UsagePolicy()), NamedPolicy("b", UsagePolicy(priorities=tuple(Priority)))], True),
    ],
)
def test_22D4_critical_is_for_whom_a_role_or_an_attached_policy_grants_it(
    said: list[NamedPolicy], grants: bool, asked: Priority, by_role: bool
) -> None:
    if asked is not CRITICAL or grants or by_role:
        assert usage_policy.apply(said, spec(priority=asked), may_be_critical=by_role).priority is asked
        return
    with pytest.raises(PolicyViolation, match=golden("model.policy.priority-critical-granted")) as caught:
        usage_policy.apply(said, spec(priority=asked), may_be_critical=by_role)
    assert "priority='NORMAL' or 'BEST_EFFORT'" in caught.value.hint


def test_22D4_a_mandatory_policy_without_critical_takes_it_from_everybody() -> None:
    said = [
        NamedPolicy("a", UsagePolicy(priorities=tuple(Priority))),
        NamedPolicy("b", UsagePolicy(priorities=(NORMAL,), mandatory=True)),
    ]
    with pytest.raises(PolicyViolation, match=re.escape(golden("model.policy.usage-policy-does"))):
        usage_policy.apply(said, spec(priority=CRITICAL), may_be_critical=True)
