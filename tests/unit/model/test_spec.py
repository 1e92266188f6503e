"""Options as users type them: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import typing
from collections.abc import Mapping

import msgspec
import pytest

from serverless_gpu.errors import InvalidOption, InvalidValue, UnknownGpuType, UsageError
from serverless_gpu.model.hardware import GpuType
from serverless_gpu.model.lifecycle.attempt import Limits
from serverless_gpu.model.spec import (
    Options,
    Priority,
    RayCluster,
    Resources,
    RunSpec,
    hang_warning_s,
    make_spec,
    parse_bytes,
)
from tests.support.golden import golden

VALID = (
    "valid options: cpus, env, gpu_type, gpus, grace, hang_timeout, idle_timeout, ignore_busy, init, memory, "
    "num_gpus, on_interrupt, policy, pool, priority, quiet, ranks_log, remote, resume, retries, retry_on_infra, "
    "same_node, secrets, tags, team, timeout, tracking, wait"
)
FIRST = ("gpus", "gpu_type", "remote", "timeout")


def spec(own: tuple[GpuType, ...] = (), /, **options: object) -> RunSpec:
    first = {"remote": False, **{name: options.pop(name) for name in FIRST if name in options}}
    return make_spec(first.get("gpus"), first.get("gpu_type"), first["remote"], first.get("timeout"), options, own)


def resources(**fields: object) -> RunSpec:
    return RunSpec(resources=msgspec.structs.replace(Resources(), **fields))


def test_nothing_asked_for() -> None:
    assert spec() == RunSpec()


MY_CARD = GpuType(name="MyCard", memory_bytes=2**30)

GOOD: dict[str, tuple[Mapping[str, object], RunSpec]] = {
    "gpus": ({"gpus": 8}, resources(gpus=8)),
    "num_gpus": ({"num_gpus": 8}, resources(gpus=8)),
    "num_gpus that agrees": ({"gpus": 8, "num_gpus": 8}, resources(gpus=8)),
    "num_gpus none": ({"num_gpus": None}, RunSpec()),
    "gpu_type in any case": ({"gpu_type": "h100"}, resources(gpu_type="H100")),
    "gpu_type as a shape": ({"gpu_type": "GPU_8xH100"}, resources(gpu_type="H100")),
    "remote": ({"remote": True}, RunSpec(remote=True, environment="auto")),
    "remote live": ({"remote": True, "env": "live"}, RunSpec(remote=True)),
    "timeout whole": ({"timeout": 3}, RunSpec(timeout_s=3.0)),
    "timeout fraction": ({"timeout": 0.5}, RunSpec(timeout_s=0.5)),
    "grace": ({"grace": 5}, RunSpec(grace_s=5.0)),
    "cpus": ({"cpus": 4}, resources(cpus=4)),
    "cpus none": ({"cpus": None}, RunSpec()),
    "memory none": ({"memory": None}, RunSpec()),
    "same_node": ({"same_node": True}, resources(same_node=True)),
    "ignore_busy": ({"ignore_busy": True}, resources(ignore_busy=True)),
    "tags": ({"tags": {"team": "search"}}, RunSpec(tags={"team": "search"})),
    "policy": ({"policy": "p"}, RunSpec(policy="p")),
    "policy none": ({"policy": None}, RunSpec()),
    "pool": ({"pool": "p"}, RunSpec(pool="p")),
    "team": ({"team": "t"}, RunSpec(team="t")),
    "priority in any case": ({"priority": "critical"}, RunSpec(priority=Priority.CRITICAL)),
    "priority as the enumeration": ({"priority": Priority.BEST_EFFORT}, RunSpec(priority=Priority.BEST_EFFORT)),
    "retries": ({"retries": 3}, RunSpec(retries=3)),
    "resume": ({"resume": True}, RunSpec(resume=True)),
    "retry_on_infra": ({"retry_on_infra": True}, RunSpec(retry_on_infra=True)),
    "env": ({"env": "live"}, RunSpec()),
    "env none": ({"env": None}, RunSpec()),
    "env snapshot": ({"env": "snapshot"}, RunSpec(environment="snapshot")),
    "hang_timeout none": ({"hang_timeout": None}, RunSpec()),
    "hang_timeout": ({"hang_timeout": 1800}, RunSpec(hang_timeout_s=1800.0)),
    "idle_timeout none": ({"idle_timeout": None}, RunSpec()),
    "idle_timeout": ({"idle_timeout": 3600}, RunSpec(idle_timeout_s=3600.0)),
    "secrets": ({"secrets": ["a", "b"]}, RunSpec(secrets=("a", "b"))),
    "ranks_log all": ({"ranks_log": "all"}, RunSpec(ranks_log=None)),
    "ranks_log some": ({"ranks_log": [0, 3]}, RunSpec(ranks_log=(0, 3))),
    "ranks_log range": ({"ranks_log": range(2)}, RunSpec(ranks_log=(0, 1))),
    "ranks_log none of them": ({"ranks_log": []}, RunSpec(ranks_log=())),
    "tracking": ({"tracking": False}, RunSpec(tracking=False)),
    "quiet": ({"quiet": True}, RunSpec(quiet=True)),
    "on_interrupt cancel": ({"on_interrupt": "cancel"}, RunSpec()),
    "init none": ({"init": None}, RunSpec()),
    "wait": ({"wait": True}, RunSpec(wait=True)),
    "init": ({"init": "nccl", "gpu_type": "H100"}, msgspec.structs.replace(resources(gpu_type="H100"), init="nccl")),
    "init gloo": ({"init": "gloo"}, RunSpec(init="gloo")),
    "on_interrupt detach": ({"on_interrupt": "detach"}, RunSpec(on_interrupt="detach")),
}


@pytest.mark.parametrize(("options", "expected"), GOOD.values(), ids=GOOD)
def test_what_is_accepted(options: Mapping[str, object], expected: RunSpec) -> None:
    assert spec(**options) == expected


def test_every_option_is_tried_above() -> None:
    tried = {name for options, _ in GOOD.values() for name in options}
    assert tried | {"memory"} == {*FIRST, *typing.get_type_hints(Options)}


def test_own_types_are_known() -> None:
    assert spec((MY_CARD,), gpu_type="my-card") == resources(gpu_type="MyCard")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1, 1),
        (2**60, 2**60),
        ("512", 512),
        ("64GiB", 64 * 2**30),
        ("64 GiB", 64 * 2**30),
        ("64gib", 64 * 2**30),
        ("64Gi", 64 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.5G", 1_500_000_000),
        ("2kB", 2_000),
        ("3MiB", 3 * 2**20),
        (" 3M ", 3_000_000),
        ("1KiB", 1024),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        ("10B", 10),
    ],
)
def test_bytes_in_numbers_or_words(memory: object, expected: int) -> None:
    assert parse_bytes("memory", memory) == expected


def test_memory_is_a_number_of_bytes() -> None:
    assert spec(memory="64Gi") == resources(memory_bytes=64 * 2**30)


@pytest.mark.parametrize("memory", [1, 8, "8", "63MiB"])
def test_23B6_memory_that_holds_no_interpreter_is_refused_and_a_unit_asked_for(memory: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        spec(memory=memory)
    assert "unit" in caught.value.hint


@pytest.mark.parametrize("timeout", ["5m", " 300s", 300])
def test_23B6_durations_have_units(timeout: object) -> None:
    assert spec(timeout=timeout, idle_timeout=timeout, grace=timeout) == spec(timeout=300, idle_timeout=300, grace=300)


WRONG_TYPE: dict[str, tuple[Mapping[str, object], str]] = {
    "gpus text": ({"gpus": "8"}, "gpus must be a whole number, not '8'"),
    "gpus bool": ({"gpus": True}, "gpus must be a whole number, not True"),
    "gpus float": ({"gpus": 8.0}, "gpus must be a whole number, not 8.0"),
    "num_gpus text": ({"num_gpus": "8"}, "gpus must be a whole number, not '8'"),
    "gpu_type number": ({"gpu_type": 100}, "gpu_type must be a string such as 'H100', not 100"),
    "remote text": ({"remote": "yes"}, "remote must be True or False, not 'yes'"),
    "remote number": ({"remote": 1}, "remote must be True or False, not 1"),
    "timeout text": ({"timeout": "1 hour"}, "timeout must be seconds, or text such as '5m', not '1 hour'"),
    "timeout bool": ({"timeout": True}, "timeout must be seconds, or text such as '5m', not True"),
    "hang_timeout": ({"hang_timeout": "1 hour"}, "hang_timeout must be seconds, or text such as '5m', not '1 hour'"),
    "idle_timeout": ({"idle_timeout": "1 hour"}, "idle_timeout must be seconds, or text such as '5m', not '1 hour'"),
    "grace none": ({"grace": None}, "grace must be seconds, or text such as '5m', not None"),
    "cpus text": ({"cpus": "4"}, "cpus must be a whole number, not '4'"),
    "memory float": (
        {"memory": 1.5},
        "memory must be a number of bytes or a string such as '64GiB', not 1.5",
    ),
    "memory bool": (
        {"memory": True},
        "memory must be a number of bytes or a string such as '64GiB', not True",
    ),
    "memory words": (
        {"memory": "lots"},
        "memory must be a number of bytes or a string such as '64GiB', not 'lots'",
    ),
    "memory unit": (
        {"memory": "5PB"},
        "memory must be a number of bytes or a string such as '64GiB', not '5PB'",
    ),
    "memory unit twice": (
        {"memory": "5GG"},
        "memory must be a number of bytes or a string such as '64GiB', not '5GG'",
    ),
    "memory nothing": (
        {"memory": ""},
        "memory must be a number of bytes or a string such as '64GiB', not ''",
    ),
    "memory not a number": (
        {"memory": "nan"},
        "memory must be a number of bytes or a string such as '64GiB', not 'nan'",
    ),
    "same_node": ({"same_node": 1}, "same_node must be True or False, not 1"),
    "ignore_busy": ({"ignore_busy": "x"}, "ignore_busy must be True or False, not 'x'"),
    "init": ({"init": True}, "init must be 'nccl', 'gloo' or None, not True"),
    "tags list": ({"tags": ["a"]}, "tags must be a dictionary of strings, not ['a']"),
    "tags number": ({"tags": {"a": 1}}, "tags must be strings, not 'a': 1"),
    "tags key": ({"tags": {1: "a"}}, "tags must be strings, not 1: 'a'"),
    "policy": ({"policy": 5}, "policy must be a non-empty string, not 5"),
    "policy empty": ({"policy": ""}, "policy must be a non-empty string, not ''"),
    "pool": ({"pool": 5}, "pool must be a non-empty string, not 5"),
    "team": ({"team": b"x"}, "team must be a non-empty string, not b'x'"),
    "retries": ({"retries": "3"}, "retries must be a whole number, not '3'"),
    "resume": ({"resume": "ask"}, "resume must be True or False, not 'ask'"),
    "retry_on_infra": ({"retry_on_infra": 3}, "retry_on_infra must be True or False, not 3"),
    "secrets text": (
        {"secrets": "a"},
        "secrets must be a list of names, or a dictionary from names to variables, not 'a'",
    ),
    "secrets number": (
        {"secrets": 5},
        "secrets must be a list of names, or a dictionary from names to variables, not 5",
    ),
    "secrets numbers": ({"secrets": [5]}, "secrets must be names, or names and variables, not [5]"),
    "ranks_log text": ({"ranks_log": "0"}, "ranks_log must be 'all' or a list of ranks, not '0'"),
    "ranks_log number": ({"ranks_log": 0}, "ranks_log must be 'all' or a list of ranks, not 0"),
    "ranks_log texts": ({"ranks_log": ["0"]}, "ranks_log must be a whole number, not '0'"),
    "tracking": ({"tracking": None}, "tracking must be True or False, not None"),
    "quiet": ({"quiet": 0}, "quiet must be True or False, not 0"),
}


@pytest.mark.parametrize(("options", "message"), WRONG_TYPE.values(), ids=WRONG_TYPE)
def test_the_wrong_type(options: Mapping[str, object], message: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        spec(**options)
    assert str(caught.value) == message
    assert isinstance(caught.value, TypeError)


IMPOSSIBLE: dict[str, tuple[Mapping[str, object], str]] = {
    "no gpus": ({"gpus": 0}, "gpus must be between 1 and 100000, not 0"),
    "negative gpus": ({"gpus": -1}, "gpus must be between 1 and 100000, not -1"),
    "a million gpus": ({"gpus": 1_000_000}, "gpus must be between 1 and 100000, not 1000000"),
    "two numbers of gpus": (
        {"gpus": 4, "num_gpus": 8},
        "gpus=4 and num_gpus=8 disagree\nhint: num_gpus is an alias of gpus: give one of them",
    ),
    "timeout zero": ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
    "timeout negative": ({"timeout": -1.5}, "timeout must be a positive number of seconds, not -1.5"),
    "timeout for ever": ({"timeout": float("inf")}, "timeout must be a positive number of seconds, not inf"),
    "timeout not a number": ({"timeout": float("nan")}, "timeout must be a positive number of seconds, not nan"),
    "grace": ({"grace": 0}, "grace must be a positive number of seconds, not 0"),
    "cpus": ({"cpus": 0}, "cpus must be between 1 and 100000, not 0"),
    "no memory": ({"memory": 0}, f"memory must be between 1 and {2**60}, not 0"),
    "negative memory": ({"memory": "-1GiB"}, f"memory must be between 1 and {2**60}, not {-(2**30)}"),
    "memory of a fraction of a byte": ({"memory": "0.1B"}, f"memory must be between 1 and {2**60}, not 0"),
    "too many tags": ({"tags": {str(n): "x" for n in range(65)}}, "65 tags are over the limit of 64"),
    "long tag": ({"tags": {"a": "x" * 257}}, "tag 'a' is longer than 256 characters"),
    "long key": ({"tags": {"k" * 257: "x"}}, f"tag '{'k' * 40}' is longer than 256 characters"),
    "priority": ({"priority": "high"}, "priority must be one of CRITICAL, NORMAL, BEST_EFFORT, not 'high'"),
    "priority number": ({"priority": 5}, "priority must be one of CRITICAL, NORMAL, BEST_EFFORT, not 5"),
    "retries": ({"retries": 101}, "retries must be between 0 and 100, not 101"),
    "negative retries": ({"retries": -1}, "retries must be between 0 and 100, not -1"),
    "ranks_log": ({"ranks_log": [-1]}, "ranks_log must be between 0 and 100000, not -1"),
    "env": (
        {"env": "torch-2.9"},
        "env='torch-2.9' is not valid\n"
        "hint: 'live' imports the caller's files in place, 'snapshot' imports a copy of them from the time of the call",
    ),
    "hang_timeout": ({"hang_timeout": 0}, "hang_timeout must be a positive number of seconds, not 0"),
    "idle_timeout": ({"idle_timeout": 0}, "idle_timeout must be a positive number of seconds, not 0"),
    "on_interrupt": ({"on_interrupt": "ignore"}, "on_interrupt must be 'cancel' or 'detach', not 'ignore'"),
}


@pytest.mark.parametrize(("options", "message"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_the_impossible(options: Mapping[str, object], message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        spec(**options)
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "options",
    [{"memory": "inf"}, {"memory": "1e400"}, {"memory": "infGiB"}, {"timeout": 1e300}, {"timeout": 10**400}],
    ids=["memory inf", "memory 1e400", "memory infGiB", "timeout 1e300", "timeout 10**400"],
)
def test_what_no_machine_has_is_refused_and_not_a_crash(options: Mapping[str, object]) -> None:
    with pytest.raises(UsageError):
        spec(**options).limits()


@pytest.mark.parametrize(
    ("name", "guess"),
    [("gpu", " (did you mean 'gpus'?)"), ("time_out", " (did you mean 'timeout'?)"), ("xyzzy", "")],
)
def test_an_unknown_option_lists_the_valid_ones(name: str, guess: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        spec(**{name: 1})
    assert str(caught.value) == golden("model.spec.option-hint", name=name, guess=guess, VALID=VALID)


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(UnknownGpuType) as caught:
        spec(gpu_type="H1000")
    assert "H1000" in caught.value.message


def test_options_are_read_and_not_changed() -> None:
    options = {"num_gpus": 2, "tags": {"a": "b"}}
    made = make_spec(None, None, False, None, options, ())
    assert options == {"num_gpus": 2, "tags": {"a": "b"}}
    assert made.tags == {"a": "b"} and made.tags is not options["tags"]


def test_limits() -> None:
    assert RunSpec().limits() == Limits(timeout_ns=None, grace_ns=30_000_000_000)
    assert spec(timeout=1.5, grace=0.25).limits() == Limits(timeout_ns=1_500_000_000, grace_ns=250_000_000)
    hangs = msgspec.structs.replace(spec(hang_timeout=1.5), hang_warning_s=0.0)
    assert hangs.limits() == Limits(hang_warning_ns=None, hang_timeout_ns=1_500_000_000)


def test_a_driver_of_ray_may_wait_for_its_tasks_as_long_as_it_likes() -> None:
    limits = msgspec.structs.replace(spec(timeout=60, hang_timeout=1.5), ray=RayCluster()).limits()
    assert limits == Limits(timeout_ns=60_000_000_000, hang_warning_ns=None, hang_timeout_ns=None)


def test_with_ray_a_node_has_one_process_whatever_its_devices() -> None:
    assert [RunSpec(ray=ray).processes(8) for ray in (None, RayCluster())] == [8, 1]


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 600.0), ("", 600.0), ("0", 0.0), ("90", 90.0), (" 1.5 ", 1.5), ("1e3", 1000.0)]
)
def test_when_the_caller_wants_to_be_warned_of_a_hang(text: str | None, seconds: float) -> None:
    assert hang_warning_s(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "1e300", "10 min"])
def test_a_warning_time_that_is_no_number_of_seconds(text: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        hang_warning_s(text)
    assert str(caught.value) == golden("model.spec.serverless-gpu-hang", text=text)


def test_a_spec_survives_the_wire() -> None:
    made = spec(
        gpus=2, gpu_type="H100", timeout=3, tags={"a": "b"}, ranks_log="all", secrets=["s"], priority="critical"
    )
    assert msgspec.json.decode(msgspec.json.encode(made), type=RunSpec) == made
