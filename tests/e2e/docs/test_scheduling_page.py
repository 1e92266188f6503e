"""The worked examples of docs/concepts/scheduling.md: what their tables say follows from their tables."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from serverless_gpu.model.scheduling.planner import Planner
from serverless_gpu.model.scheduling.preemption import PoolTerms, may_ask
from serverless_gpu.model.scheduling.values import (
    BEST_EFFORT,
    Arrived,
    DeviceShare,
    DevicesTaken,
    Gone,
    Node,
    NodeSeen,
    Pool,
    PoolSeen,
    QueuedRun,
    QueuePolicy,
    RunningRun,
    Used,
)
from serverless_gpu.model.scheduling.wait_messages import sentence
from tests.support.golden import golden
from tests.support.paths import REPOSITORY

_PAGE = (REPOSITORY / "docs" / "concepts" / "scheduling.md").read_text(encoding="utf-8")
_EXAMPLE = _PAGE.partition("## A worked example")[2].partition("\n## ")[0]
_TYPE, _NODES, _DEVICES = "H100", ("n1", "n2", "n3"), 8
_WEEK_NS = 7 * 86_400 * 10**9

_Row = dict[str, str]


def _tables(text: str) -> Iterator[list[_Row]]:
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines())
        yield [dict(zip(head, row, strict=True)) for row in rows]


def _messages(text: str) -> Iterator[tuple[str, str]]:
    """Yield the head and the message of each entry in the text blocks of a section."""
    for block in re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for entry in re.findall(r"^\S.*\n(?:^ +.*\n)*", block, re.MULTILINE):
            head, _, message = " ".join(entry.split()).partition(": ")
            yield head, message


_SECTION = _PAGE.partition("## Gangs on several nodes")[2].partition("\n## ")[0]
_USED, _THERE, _WAITING, _STARTS = _tables(_EXAMPLE)
_MESSAGES = [(at, run, message) for head, message in _messages(_EXAMPLE) for at, _, run in [head.partition(" ")]]
(_SEVERAL,) = _tables(_SECTION)
_SEVERAL_MESSAGES = dict(_messages(_SECTION))


def _at_ns(text: str) -> int:
    hours, minutes = text.split(":")
    return _WEEK_NS + (int(hours) * 60 + int(minutes)) * 60 * 10**9


def _clock(at_ns: int) -> str:
    minutes = (at_ns - _WEEK_NS) // 10**9 // 60
    return f"{minutes // 60:02d}:{minutes % 60:02d}"


def _wanted(row: _Row) -> QueuedRun:
    amount, _, unit = row["timeout"].partition(" ")
    return QueuedRun(
        run_id=row["run"],
        title=row["run"],
        owner=row["run"].partition("/")[0],
        team=row["team"],
        queued_ns=_at_ns(row["since"]),
        gpus=int(row["GPUs"]),
        gpu_type=_TYPE,
        limit_s=int(amount) * {"h": 3_600.0, "min": 60.0}[unit] if amount else None,
    )


@pytest.fixture
def planner() -> Planner:
    planner = Planner(QueuePolicy(team_weights={row["team"]: float(row["weight"]) for row in _USED}))
    planner.apply(NodeSeen(Node(id=name, name=name, total={_TYPE: _DEVICES})) for name in _NODES)
    used_s = {row["team"]: float(row["used a week ago, GPU-hours"]) * 3_600 for row in _USED}
    planner.apply([Used(at_ns=_at_ns("12:00") - _WEEK_NS, teams=used_s, users={})])
    for row in _THERE:
        share = DeviceShare(node_id=row["node"], gpu_type=_TYPE, count=int(row["GPUs"]))
        planner.apply([DevicesTaken(RunningRun(wanted=_wanted(row), shares=(share,), since_ns=_at_ns(row["since"])))])
    planner.apply(Arrived(_wanted(row)) for row in _WAITING)
    return planner


@pytest.mark.parametrize("row", _USED, ids=lambda row: str(row["team"]))
def test_what_teams_have_used_counts_half_after_a_week(planner: Planner, row: _Row) -> None:
    counts = planner.usage(_at_ns("12:00"))[row["team"]].counted_gpu_s / 3_600
    assert f"{counts:.1f}" == row["counts now, GPU-hours"]
    assert f"{counts / float(row['weight']):.2f}" == row["per weight"]


def test_which_runs_start_where_and_what_waiting_runs_show(planner: Planner) -> None:
    started, shown = [], []
    for at in dict.fromkeys(row["at"] for row in _STARTS):
        happened = {row["what has happened"] for row in _STARTS if row["at"] == at} - {""}
        planner.apply(Gone(text.removesuffix(" has ended")) for text in happened)
        decision = planner.decide(_at_ns(at))
        for placement in decision.placements:
            started += [(at, placement.run_id, share.node_id) for share in placement.shares]
        for when, run, _ in _MESSAGES:
            if when == at:
                wait = planner.why(run, _at_ns(at))
                assert wait is not None
                shown.append((at, run, sentence(wait, _clock)))
    assert started == [(row["at"], row["starts"], row["on"]) for row in _STARTS if row["starts"]]
    assert shown == _MESSAGES


@pytest.mark.parametrize("row", _SEVERAL, ids=lambda row: str(row["run"]))
def test_what_a_waiting_gang_on_several_nodes_shows(row: _Row) -> None:
    planner = Planner(QueuePolicy())
    planner.apply([PoolSeen(Pool(name="research"))])
    planner.apply(NodeSeen(Node(id=name, name=name, pool="research", total={_TYPE: _DEVICES})) for name in ("n1", "n2"))
    there = _several("alice/bert-ft", "11:20", 3, hours=3)
    share = DeviceShare(node_id="n2", gpu_type=_TYPE, count=3)
    planner.apply([DevicesTaken(RunningRun(wanted=there, shares=(share,), since_ns=there.queued_ns))])
    planner.apply([Arrived(_several(row["run"], "12:00", int(row["GPUs"]), alone=bool(row["same_node"])))])
    assert planner.decide(_at_ns("12:00")).placements == ()
    wait = planner.why(row["run"], _at_ns("12:00"))
    assert wait is not None and sentence(wait, _clock) == _SEVERAL_MESSAGES[row["run"]]


def _several(run: str, since: str, gpus: int, *, hours: int = 1, alone: bool = False) -> QueuedRun:
    return QueuedRun(
        run_id=run,
        title=run,
        owner=run.partition("/")[0],
        queued_ns=_at_ns(since),
        gpus=gpus,
        gpu_type=_TYPE,
        limit_s=3_600.0 * hours,
        several_nodes=not alone,
        alone="without same_node=True" if alone else "",
    )


_NUMBERS = {"ten": 10, "three": 3}


def _number(page: str, pattern: str) -> int:
    """Return the number, in digits or as a word, that a page has where a pattern says."""
    (found,) = re.findall(pattern, re.sub(r"\s+", " ", page))
    return _NUMBERS[found] if found in _NUMBERS else int(found)


def test_22D8_both_pages_say_how_long_devices_are_kept_before_a_higher_class_may_have_them() -> None:
    server = (REPOSITORY / "docs" / "how-to" / "server.md").read_text(encoding="utf-8")
    minutes, policy = QueuePolicy().preempt_after_s / 60, QueuePolicy()
    assert (
        _number(_PAGE, r"(?:for|than) (\w+) minutes(?: after the run.s placement)? \(`queue_preempt_after`\)")
        == minutes
    )
    assert (
        _number(server, r"(?:for|than) (\w+) minutes(?: after the run.s placement)? \(`queue_preempt_after`\)")
        == minutes
    )
    assert _number(_PAGE, r"at most (\w+) times") == policy.preemptions_max
    assert _number(server, r"at most (\w+) times") == policy.preemptions_max


def test_22D8_what_a_pool_lends_is_asked_back_at_once_and_a_lower_class_after_ten_minutes() -> None:
    assert golden("docs.scheduling_page.borrowed-asked-once") in " ".join(_PAGE.split())
    research = Pool(name="research", reserved=True, lends=True)
    terms = PoolTerms(policy=QueuePolicy(), pools={research.name: research})
    held = QueuedRun(run_id="bob/tune", title="bob/tune", priority=BEST_EFFORT, queued_ns=0, preemptible=True)
    running = RunningRun(wanted=held, shares=(), since_ns=_WEEK_NS)

    def asked_after_s(pool: str) -> float:
        node = Node(id="n1", name="n1", pool=pool, total={_TYPE: _DEVICES})
        wanted = QueuedRun(run_id="alice/bert-ft", title="alice/bert-ft", queued_ns=0, pool=pool)
        since_ns = may_ask(wanted, running, node, terms)
        assert since_ns is not None
        return (since_ns - _WEEK_NS) / 1e9

    assert (asked_after_s("research"), asked_after_s("")) == (0, 600)
