"""Which run directories are deleted, and deleting them: nothing else is touched."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.calendars import DAY_NS, HOUR_NS
from serverless_gpu.model.lifecycle.retention import Policy, RunDirectory, to_delete
from serverless_gpu.node.attempt import retention
from serverless_gpu.node.attempt.retention import RetentionSchedule, clean, cleaned_text, delete, empty_trash, scan
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import Home
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.node.retention import make_run

NOW_NS = 1_000 * DAY_NS

entries = st.lists(
    st.builds(
        RunDirectory,
        run_id=st.uuids().map(str),
        ended_ns=st.none() | st.integers(NOW_NS - 90 * DAY_NS, NOW_NS + DAY_NS),
        size_bytes=st.integers(0, 100),
    ),
    max_size=12,
    unique_by=lambda entry: entry.run_id,
)
policies = st.builds(
    Policy,
    age_ns=st.none() | st.integers(0, 60 * DAY_NS),
    size_bytes_max=st.none() | st.integers(0, 500),
    spared_ns=st.integers(0, 2 * DAY_NS),
)


class FakePass:
    """A pass that ends when a test says so."""

    def __init__(self, rc: int | None) -> None:
        self.rc = rc

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self.rc


@given(entries, policies)
def test_what_has_not_ended_or_only_just_is_kept(given_entries: list[RunDirectory], policy: Policy) -> None:
    for entry in to_delete(given_entries, policy, NOW_NS):
        assert entry.ended_ns is not None
        assert NOW_NS - entry.ended_ns >= policy.spared_ns


@given(entries, policies)
def test_nothing_old_stays_and_the_rest_fits(given_entries: list[RunDirectory], policy: Policy) -> None:
    deleted = to_delete(given_entries, policy, NOW_NS)
    kept = [entry for entry in given_entries if entry.ended_ns is not None and entry not in deleted]
    old = [entry for entry in kept if NOW_NS - (entry.ended_ns or 0) >= policy.spared_ns]
    if policy.age_ns is not None:
        assert all(NOW_NS - (entry.ended_ns or 0) <= policy.age_ns for entry in old)
    if policy.size_bytes_max is not None:
        assert sum(entry.size_bytes for entry in kept) <= policy.size_bytes_max or not old


@given(entries, policies)
def test_the_oldest_go_first_and_no_more_than_must(given_entries: list[RunDirectory], policy: Policy) -> None:
    deleted = to_delete(given_entries, policy, NOW_NS)
    ended = [entry.ended_ns or 0 for entry in deleted]
    assert ended == sorted(ended)
    if deleted and policy.size_bytes_max is not None:
        last = deleted[-1]
        before = [e for e in given_entries if e.ended_ns is not None and e not in deleted[:-1]]
        too_old = policy.age_ns is not None and NOW_NS - (last.ended_ns or 0) > policy.age_ns
        assert too_old or sum(entry.size_bytes for entry in before) > policy.size_bytes_max


@given(entries, policies, st.randoms())
def test_the_order_of_entries_means_nothing(given_entries: list[RunDirectory], policy: Policy, random: object) -> None:
    shuffled = sorted(given_entries, key=lambda entry: entry.run_id[::-1])
    assert to_delete(shuffled, policy, NOW_NS) == to_delete(given_entries, policy, NOW_NS)


def test_without_limits_everything_stays() -> None:
    old = RunDirectory(run_id="a", ended_ns=0, size_bytes=10**15)
    assert to_delete([old], Policy(age_ns=None, size_bytes_max=None), NOW_NS) == ()


def test_running_runs_do_not_count_against_the_size() -> None:
    running = RunDirectory(run_id="a", ended_ns=None, size_bytes=10**9)
    ended = RunDirectory(run_id="b", ended_ns=NOW_NS - DAY_NS, size_bytes=5)
    assert to_delete([running, ended], Policy(age_ns=None, size_bytes_max=5), NOW_NS) == ()


@pytest.mark.parametrize(
    ("table", "policy"),
    [
        ("", Policy(age_ns=30 * DAY_NS, size_bytes_max=20 * 2**30)),
        ("days = 7", Policy(age_ns=7 * DAY_NS, size_bytes_max=20 * 2**30)),
        ("days = 0\ngib = 0", Policy(age_ns=None, size_bytes_max=None)),
        ("days = 0.5\ngib = 1", Policy(age_ns=DAY_NS // 2, size_bytes_max=2**30)),
    ],
    ids=["default", "one of two", "no limits", "fractions"],
)
def test_the_table_of_the_configuration(tmp_path: Path, table: str, policy: Policy) -> None:
    (tmp_path / "config.toml").write_text(f"[retention]\n{table}\n")
    assert read_configuration(Home(tmp_path)).retention == policy


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("days = -1", "days must be a number of at least 0, not -1.0"),
        ("gib = nan", "gib must be a number of at least 0, not nan"),
        ("weeks = 2", "Object contains unknown field `weeks`"),
        ("days = '7'", "Expected `float`, got `str` - at `$.days`"),
    ],
)
def test_a_table_that_cannot_be(tmp_path: Path, table: str, message: str) -> None:
    (tmp_path / "config.toml").write_text(f"[retention]\n{table}\n")
    with pytest.raises(InvalidValue) as caught:
        read_configuration(Home(tmp_path))
    assert str(caught.value) == golden(
        "node.retention.table-retention", value=tmp_path / "config.toml", message=message
    )


# --- directories -----------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return an empty directory of runs."""
    path = tmp_path / "runs"
    path.mkdir()
    return path


@pytest.fixture
def held(runs: Path) -> Iterator[str]:
    """Yield a run whose supervisor lives, as its lock says."""
    run_id = make_run(runs, ended=False)
    with (runs / run_id / "1" / "supervisor.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield run_id


DAY = Policy(age_ns=DAY_NS, size_bytes_max=None)


def test_old_runs_go_and_younger_ones_stay(runs: Path) -> None:
    old, young = make_run(runs), make_run(runs, age_ns=2 * HOUR_NS)
    done = clean(runs, DAY, (), SystemClock())
    assert done.deleted == (old,)
    assert 4096 <= done.freed_bytes < 100_000
    assert cleaned_text(done).startswith("deleted 1 run, ")
    assert os.listdir(runs) == [young]


def test_by_size_the_oldest_go(runs: Path) -> None:
    made = [make_run(runs, age_ns=hours * HOUR_NS, kilobytes=1000) for hours in (5, 4, 3)]
    clean(runs, Policy(age_ns=None, size_bytes_max=2_500_000), (), SystemClock())
    assert sorted(os.listdir(runs)) == sorted(made[1:])


def test_a_run_whose_supervisor_lives_stays_however_old(runs: Path, held: str) -> None:
    assert clean(runs, DAY, (), SystemClock()).deleted == ()
    assert os.listdir(runs) == [held]


def test_an_ended_run_whose_devices_are_still_checked_stays(runs: Path, held: str) -> None:
    text = '{"type": "stopped", "state": "FAILED", "reason": "timeout", "cause": null, "consequences": []}'
    (runs / held / "1" / "stopped.json").write_text(text)
    assert clean(runs, Policy(age_ns=0, size_bytes_max=0, spared_ns=0), (), SystemClock()).deleted == ()


def test_a_lost_run_counts_from_its_last_sign_of_life(runs: Path) -> None:
    lost = make_run(runs, ended=False)
    assert clean(runs, DAY, (), SystemClock()).deleted == (lost,)


@pytest.mark.parametrize(("age_ns", "goes"), [(2 * HOUR_NS, False), (2 * DAY_NS, True)])
def test_a_run_that_was_never_launched_stays_for_a_day(runs: Path, age_ns: int, goes: bool) -> None:
    run_id = make_run(runs, age_ns=age_ns, ended=False)
    (runs / run_id / "1" / "supervisor.lock").unlink()
    at_ns = SystemClock().wall_ns() - age_ns
    os.utime(runs / run_id / "1", ns=(at_ns, at_ns))
    assert clean(runs, Policy(age_ns=HOUR_NS, size_bytes_max=0), (), SystemClock()).deleted == (
        (run_id,) if goes else ()
    )


def test_a_run_that_waits_in_the_agent_stays(runs: Path) -> None:
    run_id = make_run(runs, ended=False)
    (runs / run_id / "1" / "supervisor.lock").unlink()
    assert clean(runs, Policy(age_ns=0, size_bytes_max=0, spared_ns=0), (run_id,), SystemClock()).deleted == ()


def test_what_is_no_run_stays(runs: Path) -> None:
    (runs / "my-notes").mkdir()
    (runs / "my-notes" / "important.txt").write_text("mine")
    (runs / "a-file").write_text("mine")
    for path in (runs / "my-notes" / "important.txt", runs / "my-notes", runs / "a-file"):
        os.utime(path, ns=(0, 0))
    assert clean(runs, Policy(age_ns=0, size_bytes_max=0, spared_ns=0), (), SystemClock()).deleted == ()
    assert (runs / "my-notes" / "important.txt").read_text() == "mine"


def test_links_are_not_followed(runs: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "data").write_text("mine")
    run_id = make_run(runs)
    (runs / run_id / "1" / "logs" / "link").symlink_to(elsewhere)
    moved = make_run(runs)
    (runs / moved).rename(tmp_path / "moved")
    (runs / moved).symlink_to(tmp_path / "moved")
    assert set(clean(runs, DAY, (), SystemClock()).deleted) == {run_id, moved}
    assert os.listdir(runs) == []
    assert (elsewhere / "data").read_text() == "mine"
    assert (tmp_path / "moved" / "1" / "spec.json").exists()


def test_a_directory_without_write_permission_goes_too(runs: Path) -> None:
    run_id = make_run(runs)
    (runs / run_id / "1" / "logs").chmod(stat.S_IRUSR | stat.S_IXUSR)
    delete(runs, run_id)
    assert os.listdir(runs) == []


def test_a_run_that_somebody_else_deletes_meanwhile_is_fine(runs: Path) -> None:
    delete(runs, new_run_id())
    assert os.listdir(runs) == []


def test_what_a_killed_deletion_left_goes_with_the_next(runs: Path) -> None:
    (runs / ".trash-01abc-1" / "1").mkdir(parents=True)
    (runs / ".trash-01abd-1").symlink_to("/etc")
    assert scan(runs, (), NOW_NS) == []
    empty_trash(runs)
    assert os.listdir(runs) == []


def test_one_pass_has_a_bound(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "DELETED_MAX", 2)
    made = [make_run(runs, age_ns=days * DAY_NS) for days in (5, 4, 3)]
    assert clean(runs, DAY, (), SystemClock()).deleted == tuple(made[:2])


# --- the agent's end -------------------------------------------------------------------------------------------------


def test_it_is_due_a_little_after_the_start_and_then_every_hour() -> None:
    clock, told = FakeClock(), list[str]()

    def start(fd: int) -> FakePass:
        told.append(os.pread(fd, 1000, 0).decode())
        return FakePass(0)

    schedule = RetentionSchedule(clock, start)
    for seconds in (0.0, 9.0, 2.0, 3000.0, 700.0, 1.0):
        clock.advance(seconds)
        schedule.tend(["a", "b"])
    assert told == ["a\nb", "a\nb"]


def test_a_pass_that_takes_longer_than_an_hour_is_waited_for() -> None:
    clock, passes = FakeClock(), list[FakePass]()

    def start(fd: int) -> FakePass:
        passes.append(FakePass(None))
        return passes[-1]

    schedule = RetentionSchedule(clock, start)
    for _ in range(3):
        clock.advance(4000)
        schedule.tend([])
    assert len(passes) == 1, "one pass at a time"
    passes[0].rc = 0
    schedule.tend([])
    assert len(passes) == 2


def test_no_process_to_be_had_is_no_reason_to_end() -> None:
    def refuse(fd: int) -> FakePass:
        raise OSError("no process")

    clock = FakeClock()
    schedule = RetentionSchedule(clock, refuse)
    clock.advance(20)
    schedule.tend([])
