"""Who spends far more than usual is told of, once; and the webhook is told of everything, whoever listens there."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.pricing import Price
from serverless_gpu.model.lifecycle.attempt import Reason
from serverless_gpu.model.spec import Command, Resources
from serverless_gpu.server.budgets.notice_webhook import FIRST_PAUSE_S, OLD_S, TRIES_MAX, NoticeWebhook
from serverless_gpu.server.budgets.spend_alarms import SpendAlarms
from serverless_gpu.server.core.caller import check_name
from serverless_gpu.server.core.settings import read_settings
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import audit, budgets, prices
from serverless_gpu.server.records.budgets import NoticeKind
from serverless_gpu.testing import FakeClock
from tests.support.golden import golden
from tests.support.server.ledgered import account, charge
from tests.support.server.made import made_services, recomposed
from tests.support.server.spent import ROOT, UNIT, Spent
from tests.support.server.submitting import ALICE, BOB, request

NOON = 20_775 * 86_400 * 10**9 + 12 * 3_600 * 10**9
HOUR_NS = 3_600 * 10**9
COMMAND = Command(argv=("true",), per="rank")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(wall_ns=NOON)


@pytest.fixture
def spent(database: Database, tmp_path: Path, clock: FakeClock) -> Spent:
    made = made_services(database, tmp_path, clock=clock)
    made.principals.make_team(ROOT, "search")
    return Spent(database, made, clock)


def alarms(spent: Spent, who: Any = ROOT, reach: str = "all") -> list[str]:
    return [each.sentence for each in spent.services.budgets.view_all(who, reach).alarms]


def ran(spent: Spent, gpus: int, reason: Reason | None = None, **spec: Any) -> str:
    run_id = spent.submit(gpus=gpus, name="fit", **spec)
    spent.start(run_id)
    spent.go_on(61, run_id)
    if reason is not None:
        spent.end(run_id, reason)
    return run_id


def test_a_run_that_costs_far_more_than_others_of_its_name_is_told_of_once(spent: Spent) -> None:
    for _ in range(4):
        ran(spent, 1, Reason.COMPLETED, payload=COMMAND)
    first = ran(spent, 4, payload=COMMAND)
    assert alarms(spent) == []  # four are not enough to say what is usual
    spent.end(first, Reason.COMPLETED)
    run_id = ran(spent, 4, payload=COMMAND)
    said = golden("server.alarms.run-uses-usual", run_id=run_id)
    assert alarms(spent) == [said]
    spent.go_on(61, run_id)
    spent.services.make(SpendAlarms).tick(spent.clock.boottime_ns())  # after a start
    assert alarms(spent) == [said] == alarms(spent, ALICE, "team")
    assert alarms(spent, BOB, "team") == []
    assert [sentence for _, sentence in spent.told(run_id)].count(said) == 1
    entries = [entry for entry in spent.database.read(audit.entries) if entry.action == "spend.alarm"]
    assert [(entry.principal, entry.subject) for entry in entries] == [("server", run_id)]
    spent.end(run_id, Reason.COMPLETED)
    ran(spent, 3, payload=COMMAND)  # three times the usual is not more than that
    assert len(alarms(spent)) == 1
    rows = spent.database.read(lambda connection: budgets.said(connection, since_ns=0))
    with pytest.raises(InvalidValue, match="cannot be named"):  # taking away a budget makes no alarm be said again
        check_name("a budget", next(name for name, _, percent in rows if percent == 0))


def test_cores_that_all_runs_of_a_name_have_are_no_alarm(spent: Spent) -> None:
    row = Price(resource="core", micros_per_hour=3_600 * UNIT, from_ns=0)
    spent.database.write(lambda connection: prices.insert(connection, row, at_ns=0))
    resources = Resources(gpus=1, gpu_type="H100", cpus=8)
    for _ in range(6):
        asked = request(call=None, resources=resources, name="fit", payload=COMMAND)
        run_id = spent.services.submissions.submit(ALICE, asked).id
        spent.start(run_id)
        spent.go_on(61, run_id)
        spent.end(run_id, Reason.COMPLETED)
    assert alarms(spent) == []


def test_a_team_that_used_far_more_than_usual_in_an_hour_is_told_of_once_a_day(spent: Spent) -> None:
    def write(connection: sa.Connection) -> None:
        number = account(connection, team="search")
        for hour in range(24):
            start_ns = NOON - (100 - hour) * HOUR_NS
            day = start_ns // (24 * HOUR_NS)
            charge(connection, f"r{hour}", number, day=day, micros=10 * UNIT, start_ns=start_ns)

    spent.database.write(write)
    run_id = spent.submit(gpus=1, team="search")
    spent.start(run_id)
    spent.go_on(30, run_id)
    assert alarms(spent) == []  # 30 are three times 10, and not more
    spent.go_on(61, run_id)
    (said,) = alarms(spent)
    assert said == golden("server.alarms.team-search-used")
    spent.go_on(61, run_id)
    assert alarms(spent, ALICE, "team") == [said] and alarms(spent, BOB, "team") == []


def test_notices_and_what_was_said_are_bounded_by_themselves(spent: Spent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "NOTICES_KEPT", 2)

    def work(connection: sa.Connection) -> tuple[int, int]:
        for day in range(4):
            budgets.add_notice(connection, NoticeKind.REACHED, {}, at_ns=day)
            budgets.say(connection, "llm", start_ns=day, percent=100, at_ns=day * budgets.FORGET_NS)
        return len(budgets.open_notices(connection, limit=9)), len(budgets.said(connection, since_ns=0))

    assert spent.database.write(work) == (2, 2)


# --- the webhook ------------------------------------------------------------------------------------------------------


class _Hook(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.got.append(body)
        status = server.answers.pop(0) if server.answers else 204
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hook() -> Iterator[Any]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hook)
    server.got, server.answers = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def told(spent: Spent, url: str) -> NoticeWebhook:
    """Return who tells an address of a warning that was written down."""
    settings = msgspec.structs.replace(spent.services.settings, webhook=url)
    services = recomposed(spent.services, settings=settings)
    document = {"budget": "llm", "percent": 80, "sentence": "budget 'llm' is at 80 %"}
    at_ns = spent.clock.wall_ns()
    spent.database.write(lambda connection: budgets.add_notice(connection, NoticeKind.WARNING, document, at_ns=at_ns))
    return services.make(NoticeWebhook)


def test_F48_the_webhook_is_told_once_it_takes_it(spent: Spent, hook: Any) -> None:
    notifier = told(spent, f"http://127.0.0.1:{hook.server_port}/T0/secret")
    hook.answers += [500, 302]
    notifier.tick(spent.clock.boottime_ns())
    notifier.tick(spent.clock.boottime_ns())
    assert len(hook.got) == 1  # not before a pause
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        spent.clock.advance(pause_s)
        notifier.tick(spent.clock.boottime_ns())
    assert len(hook.got) == 3 and hook.got[0] == hook.got[2]
    assert hook.got[0] | {"id": 0} == {
        "id": 0,
        "kind": "budget.warning",
        "at": "2026-11-18T12:00:00Z",
        "budget": "llm",
        "percent": 80,
        "sentence": golden("server.alarms.budget-llm-80"),
    }
    spent.clock.advance(OLD_S)
    notifier.tick(spent.clock.boottime_ns())
    assert len(hook.got) == 3


def test_a_notice_that_is_refused_keeps_no_other_from_being_told(spent: Spent, hook: Any) -> None:
    for _ in range(3):
        notifier = told(spent, f"http://127.0.0.1:{hook.server_port}/")
    hook.answers += [400]
    for _ in range(3):
        notifier.tick(spent.clock.boottime_ns())
    first, *others = [body["id"] for body in hook.got]
    assert len(others) == 2 and first not in others
    assert notifier.tick(spent.clock.boottime_ns()) == spent.clock.boottime_ns() + round(FIRST_PAUSE_S * 1e9)
    spent.clock.advance(FIRST_PAUSE_S)
    notifier.tick(spent.clock.boottime_ns())
    assert [body["id"] for body in hook.got] == [first, *others, first]


def test_who_never_answers_is_given_up_and_named_without_the_path(
    spent: Spent, caplog: pytest.LogCaptureFixture
) -> None:
    notifier = told(spent, "http://127.0.0.1:9/T0/secret")
    for _ in range(2 * TRIES_MAX + 1):
        due_ns = notifier.tick(spent.clock.boottime_ns())
        assert due_ns is not None
        spent.clock.advance((due_ns - spent.clock.boottime_ns()) / 1e9)
    assert spent.database.read(lambda connection: budgets.open_notices(connection, limit=9)) == []
    assert golden("server.alarms.given-up-after") in caplog.text and "127.0.0.1 did not accept" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("url", "is_possible"),
    [
        ("https://hooks.example.com/T0/x", True),
        ("http://localhost:8080/x", True),
        ("http://hooks.example.com/x", False),
        ("ftp://hooks.example.com", False),
        ("hooks.example.com", False),
        ("http://127.0.0.1:99999/", False),
        ("https://[::1/x", False),
    ],
)
def test_a_webhook_is_an_address_and_plain_http_is_for_loopback(tmp_path: Path, url: str, is_possible: bool) -> None:
    if is_possible:
        assert read_settings(tmp_path, {"webhook": url}).webhook == url
        return
    with pytest.raises(InvalidValue, match="webhook"):
        read_settings(tmp_path, {"webhook": url})
