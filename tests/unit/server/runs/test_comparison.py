"""What a comparison shows of specs and environments, and what a repeated run keeps of its spec."""

from __future__ import annotations

import msgspec

from serverless_gpu.model.cost import Cost
from serverless_gpu.model.lifecycle.attempt import UNSAVED_MAX, State
from serverless_gpu.model.spec import Resources, RunSpec, Tracking
from serverless_gpu.server.runs.comparison import ComparedRun, compare, differences, spec_texts
from serverless_gpu.server.runs.rerun import submitted_spec
from serverless_gpu.wire.runs import ArgumentsView, ComparisonRow, RunEnvironmentView, RunUnitView, RunView


def unit(name: str, version: str, digest: str = "d", kind: str = "distribution") -> RunUnitView:
    return RunUnitView(kind=kind, name=name, version=version, digest=digest, size=1, files=1)


def compared(*units: RunUnitView, spec: RunSpec | None = None, **arguments: str) -> ComparedRun:
    view = RunView(
        id="r",
        name="",
        state=State.SUCCEEDED,
        reason=None,
        sentence="",
        fence=1,
        owner="ann",
        team="",
        pool="",
        node="",
        gpu_type="H100",
        world_size=2,
        created_ns=0,
        started_ns=1_000_000_000,
        ended_ns=3_000_000_000,
        stop=None,
        spec=spec or RunSpec(),
    )
    return ComparedRun(
        view=view,
        cost=Cost(micros=None, currency="USD", gpu_ms=0, billed_ms=0),
        arguments=ArgumentsView(arguments=arguments),
        environment=RunEnvironmentView(kind="snapshot", python="cpython 3.11", units=units),
    )


def rows(name: str, *runs: ComparedRun) -> dict[str, ComparisonRow]:
    return {row.label: row for section in compare(runs) if section.name == name for row in section.rows}


def test_packages_are_added_removed_and_changed() -> None:
    before = compared(unit("numpy", "1"), unit("torch", "2"), unit("old", "1"), unit("x", "", "a", "code"))
    after = compared(unit("numpy", "1"), unit("torch", "3"), unit("new", "1"), unit("x", "", "b", "code"))
    found = rows("Environment", before, after)
    assert found["torch"].values == ("2 (d)", "3 (d)")
    assert (found["old"].values, found["new"].values) == (("1 (d)", ""), ("", "1 (d)"))
    assert found["code x"].values == ("a", "b")
    assert not found["numpy"].differs
    differing = [row.label for section in differences(compare([before, after])) for row in section.rows]
    assert differing == ["torch", "old", "code x", "new"]


def test_differing_rows_come_first_and_many_equal_ones_are_only_counted() -> None:
    units = [unit(f"p{n}", "1") for n in range(100)]
    section = next(
        one for one in compare([compared(*units), compared(*units, unit("z", "1"))]) if one.name == "Environment"
    )
    assert ([row.label for row in section.rows], section.equal) == (["z"], 103)
    few = list(rows("Arguments", compared(a="1", b="1"), compared(a="1", b="2")))
    assert few == ["b", "a"]


def test_options_are_texts_with_units() -> None:
    spec = RunSpec(resources=Resources(gpus=2, memory_bytes=1 << 30), timeout_s=90, ranks_log=(0, 3), resume=True)
    texts = spec_texts(spec)
    assert (texts["gpus"], texts["timeout"], texts["ranks_log"], texts["resume"]) == ("2", "90 s", "0, 3", "yes")
    assert texts["memory"].endswith("B")
    assert not {"payload", "tags", "spec_version", "policy"} & texts.keys()


def test_a_repeated_run_has_no_limits_of_policies_and_starts_a_new_mlflow_run() -> None:
    tracked = Tracking(uri="http://m", parent_id="up")
    asked = RunSpec(name="x", idle_timeout_s=5, policy="p", tracker=tracked)
    tracker = msgspec.structs.replace(tracked, run_id="old")
    stored = msgspec.structs.replace(
        asked, max_run_s=1, total_run_s=2, attempts_max=3, unsaved_max=UNSAVED_MAX + 1, policies=("q",), tracker=tracker
    )
    assert submitted_spec(stored) == asked
