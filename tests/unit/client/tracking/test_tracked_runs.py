"""The link to a run's page in MLflow: shown once where somebody watches, and given by the handle."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.client.display.run_display import Display, TerminalDisplay
from serverless_gpu.client.runs import run as run_module
from serverless_gpu.client.runs.run import Run
from serverless_gpu.client.runs.run_source import LocalRun
from serverless_gpu.client.tracked import TrackedRun, from_directory, from_link
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base import protocol
from tests.support.client.notebook_display import Cell
from tests.support.model.ledger import FULL

RUN = "0af1" * 8
URI = "http://127.0.0.1:5000"
LINK = f"{URI}/#/experiments/3/runs/{RUN}"
TRACKED = TrackedRun(RUN, LINK, URI, "3")
STOPPED = protocol.Stopped(state=State.SUCCEEDED, reason=Reason.COMPLETED, cause=None, consequences=())


class Heard(LocalRun):
    """A run whose supervisor has said all this; nothing more comes while `goes_on`."""

    def __init__(self, directory: Path, *messages: protocol.AnyMessage, goes_on: bool = False) -> None:
        super().__init__("r1", directory, 1, None)
        self._messages, self._goes_on = deque(messages), goes_on

    @property
    def is_open(self) -> bool:
        return self._goes_on or bool(self._messages)

    def receive(self, timeout_s: float | None) -> protocol.AnyMessage | None:
        if not self._messages:
            raise TimeoutError
        return self._messages.popleft()


@pytest.mark.parametrize(
    ("url", "tracked"),
    [
        (LINK, TRACKED),
        (
            f"https://host/base/#/experiments/3/runs/{RUN}/",
            TrackedRun(RUN, f"https://host/base/#/experiments/3/runs/{RUN}/", "https://host/base", "3"),
        ),
        (
            f"{URI}/#/workspaces/a/experiments/3/runs/{RUN}",
            TrackedRun(RUN, f"{URI}/#/workspaces/a/experiments/3/runs/{RUN}", URI, "3"),
        ),
        ("", None),
        ("http://elsewhere/", None),
    ],
)
def test_a_link_says_where_the_run_is(url: str, tracked: TrackedRun | None) -> None:
    assert from_link(url) == tracked


def test_a_link_of_another_shape_still_leads_to_a_run_that_is_known() -> None:
    assert from_link("http://other/page", RUN) == TrackedRun(RUN, "http://other/page")


def test_a_handle_knows_its_run_in_mlflow_from_what_it_hears(tmp_path: Path) -> None:
    run: Run[None] = Run(Heard(tmp_path, protocol.Tracked(run_id=RUN, url=LINK), goes_on=True), RunSpec())
    assert run.tracked() == TRACKED
    run = Run(Heard(tmp_path, goes_on=True), RunSpec())
    assert run.tracked() is None


def test_a_handle_that_attaches_learns_it_from_the_first_words(tmp_path: Path) -> None:
    snapshot = protocol.AttemptSnapshot(
        run_id="r1", fence=1, state=State.RUNNING, pid=1, tracked=protocol.Tracked(run_id=RUN, url=LINK)
    )
    run: Run[None] = Run(Heard(tmp_path, snapshot, goes_on=True), RunSpec())
    assert run.tracked() == TRACKED


def test_a_run_that_has_ended_has_it_in_its_files_or_its_receipt(tmp_path: Path) -> None:
    receipt = msgspec.structs.replace(FULL, tracked=LINK)
    run: Run[None] = Run(Heard(tmp_path, STOPPED, protocol.Finished(receipt=receipt)), RunSpec())
    assert run.tracked() == TRACKED
    (tmp_path / "tracking.json").write_text(
        f'{{"state": "ready", "environ": {{}}, "run_id": "{RUN}", "url": "{LINK}"}}'
    )
    assert Run(Heard(tmp_path, STOPPED), RunSpec()).tracked() == TRACKED


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"state": "pending"}', '{"state": "failed", "url": "x", "run_id": "y"}', '{"state": 3}']
)
def test_a_file_that_says_nothing_yet_says_nothing(tmp_path: Path, text: str) -> None:
    assert from_directory(tmp_path) is None
    (tmp_path / "tracking.json").write_text(text)
    assert from_directory(tmp_path) is None


class Shown(Display):
    """A display that keeps the links it was given."""

    def __init__(self) -> None:
        self.links: list[str] = []

    def tracked(self, url: str) -> None:
        self.links.append(url)


@pytest.mark.parametrize("before", [True, False], ids=["known before it is followed", "comes while it is"])
def test_whoever_follows_a_run_is_shown_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    shown = Shown()
    monkeypatch.setattr(run_module, "make_display", lambda **_: shown)
    told = (protocol.Tracked(run_id=RUN, url=LINK),)
    run: Run[None] = Run(Heard(tmp_path, *told, STOPPED, protocol.Finished(receipt=FULL)), RunSpec())
    if before:
        assert run.status() == "SUCCEEDED"  # hears what there is
    assert run.follow() is None
    assert shown.links == [LINK]


def test_a_terminal_prints_it_once_and_not_where_quiet_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    display = TerminalDisplay(quiet=False)
    display.tracked(LINK)
    display.tracked(LINK)
    assert capsys.readouterr().err == f"serverless-gpu: MLflow: {LINK}\n"
    display.tracked("http://x/\x1b]0;title\x07")
    assert "\x1b" not in capsys.readouterr().err
    TerminalDisplay(quiet=True).tracked(LINK)
    assert capsys.readouterr().err == ""


def test_a_notebook_has_it_as_a_link_in_the_status() -> None:
    cell = Cell()
    cell.display.state("RUNNING", "")
    cell.display.tracked(LINK)
    cell.pass_time(1)
    assert f"MLflow: {LINK}" in cell.screen.plain[-1]
    assert f'<a href="{LINK}"' in cell.screen.shown[-1]["text/html"]
    cell.display.tracked('javascript:alert("x")')
    cell.pass_time(1)
    assert "<a " not in cell.screen.shown[-1]["text/html"]


def test_a_quiet_notebook_shows_no_link() -> None:
    quiet = Cell(quiet=True)
    quiet.display.tracked(LINK)
    assert quiet.screen.shown == []
