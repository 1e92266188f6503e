"""Pages of usage, budgets, policies, prices, secrets, environments, audit and server, without a browser."""

from __future__ import annotations

import csv
import datetime
import html
import html.parser
import io
import itertools
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from serverless_gpu.model.billing.usage_report import write_by
from serverless_gpu.wire.billing import BudgetList, UsageView
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path
from tests.support.web.filled import Filling
from tests.support.web.money import filled_with_hostile_names, filled_with_money

WAIT_S = 60
PATHS = ("usage", "budgets", "policies", "prices", "secrets", "environments", "audit", "server")


class Reader:
    """A signed-in browser without scripts."""

    def __init__(self, server: Served, token: str | None = None) -> None:
        self.server = server
        self.client = httpx2.Client(base_url=server.url, timeout=WAIT_S)
        self.client.get(sign_in_path(server, token))

    def get(self, path: str, status: int = 200) -> str:
        answer = self.client.get(f"/ui{path}")
        assert answer.status_code == status, (path, answer.status_code, answer.text[-2_000:])
        return answer.text

    def click(self, page: str, text: str) -> str:
        """Open the link with a text."""
        for address, label in re.findall(r'<a[^>]*\shref="([^"]+)"[^>]*>(.*?)</a>', page, flags=re.S):
            if html.unescape(re.sub(r"<[^>]*>", "", label)).split("\n")[0].strip() == text:
                answer = self.client.get(html.unescape(address))
                assert answer.status_code == 200, address
                return answer.text
        raise AssertionError(f"no link {text!r}")

    def post(self, path: str, status: int = 303, **data: Any) -> str:
        found = re.search(r'name="csrf" value="(\w+)"', self.get("/usage"))
        assert found is not None
        headers = {"Origin": self.server.url}
        answer = self.client.post(f"/ui{path}", data={"csrf": found[1], **data}, headers=headers)
        assert answer.status_code == status, (path, answer.status_code, answer.text[-2_000:])
        return answer.text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    with filled_with_money(home, 12, Filling(runs=120), database="", webhook="") as running:
        yield running


@pytest.fixture(scope="module")
def admin(server: Served) -> Iterator[Reader]:
    made = Reader(server)
    yield made
    made.client.close()


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with served(tmp_path_factory.mktemp("empty")) as running:
        made = Reader(running)
        yield made
        made.client.close()


@pytest.mark.parametrize("path", PATHS)
def test_a_new_server_has_every_page_and_says_what_to_type(empty: Reader, path: str) -> None:
    page = empty.get(f"/{path}")
    assert 'class="empty"' in page or path == "audit"  # The server itself has entries by now.


@pytest.mark.parametrize("path", PATHS)
def test_headings_are_in_order_and_inputs_have_labels(admin: Reader, path: str) -> None:
    page = admin.get(f"/{path}")
    levels = [int(level) for level in re.findall(r"<h([1-6])", page)]
    assert levels[0] == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels)), levels
    assert not re.search(r"\sstyle=|<script(?! src)|\son\w+=", page)
    bare = re.sub(r"<label.*?</label>", "", page, flags=re.S)
    assert re.findall(r'<(?:input(?! type="hidden")|select|textarea)[^>]*>', bare) == []


def test_a_viewer_has_no_buttons_that_change_something(server: Served) -> None:
    viewer = Reader(server, make_user(server, "vera", role="viewer", team="vision"))
    for path in ("usage", "budgets", "policies", "prices", "server"):
        forms = re.findall(r'<form method="post" action="([^"]+)"', viewer.get(f"/{path}"))
        assert forms == ["/ui/sign-out"], path
    for path in ("secrets", "audit", "environments"):
        viewer.get(f"/{path}", status=404)
    assert "Settings in force" not in viewer.get("/server")
    viewer.post("/budgets", status=403, name="mine", amount="1")
    viewer.client.close()


def test_clicks_alone_tell_what_a_team_spent_on_a_tag_last_week(server: Served, admin: Reader) -> None:
    page = admin.click(admin.get("/usage"), "Last week")
    page = admin.click(page, "Team")
    page = admin.click(page, "vision")
    page = admin.click(page, "Tag project")
    shown = dict(re.findall(r'<td><a href="[^"]*">(\w+)</a></td>\s*<td class="number">([\d.,]+) USD', page))
    today = datetime.datetime.now(datetime.UTC).date()
    monday = today - datetime.timedelta(days=today.weekday() + 7)
    first = (monday - datetime.date(1970, 1, 1)).days
    query = {"by": "tag:project", "from_day": str(first), "until_day": str(first + 7), "where": '{"team":"vision"}'}
    told: UsageView = server.connection().ask("GET", "/usage", answer=UsageView, query=query)
    expected = {(one.key[0] or "none"): f"{(one.amounts.micros or 0) / 1e6:,.2f}" for one in told.groups}
    assert shown == expected
    assert "atlas" in shown
    # A row leads on to the runs behind it.
    link = re.search(r'href="(/ui/runs\?[^"]*)"', page)
    assert link is not None
    assert f"from={monday}" in link[1]
    assert "team=vision" in link[1]
    assert "tag=project%3D" in link[1]


def test_every_grouping_and_measure_has_the_same_total(admin: Reader) -> None:
    totals = set()
    for by in (
        "user",
        "team",
        "gpu_type",
        "pool",
        "name",
        "policy",
        "workload",
        "environment",
        "chargeback",
        "tag:stage",
    ):
        for measure in ("cost", "time"):
            page = admin.get(f"/usage?by={by}&measure={measure}")
            totals |= set(re.findall(r'id="total-cost">([^<]+)<', page))
            assert "<svg" in page
    assert len(totals) == 1


def test_a_filter_can_be_removed_and_usage_without_a_value_can_be_selected(admin: Reader) -> None:
    page = admin.get("/usage?by=user&tag=stage%3D-,project%3Datlas")
    assert len(re.findall(r'class="chip"', page)) == 2
    assert "tag=project%3Datlas" in page
    admin.get("/usage?by=nonsense", status=400)
    admin.get("/usage?from=2026-13-01", status=400)


def test_unit_economics_have_the_median_of_each_name(admin: Reader) -> None:
    page = admin.get("/usage?by=name")
    assert "Median cost" in page
    rows = re.findall(r"<tr>(.*?)</tr>", page.split('id="h-groups"')[1], flags=re.S)
    assert [row for row in rows[1:] if row.count(" USD") < 3] == []


def test_a_long_range_has_weeks_and_months(admin: Reader) -> None:
    assert re.search(r"<td>\d{4}-W\d\d</td>", admin.get("/usage?from=2026-08-01&to=2026-11-30"))
    assert re.search(r"<td>2026-11</td>|<td>\d{4}-\d\d</td>", admin.get("/usage?from=2020-01-01&to=2027-01-30"))


def test_downloads_are_attachments_that_spreadsheets_do_not_run(server: Served, admin: Reader) -> None:
    for path in ("report.csv", "report.parquet", "records.csv"):
        answer = admin.client.get(f"/ui/usage/{path}?by=team")
        assert answer.status_code == 200
        assert answer.headers["content-disposition"].startswith("attachment;"), path
        assert answer.headers["x-content-type-options"] == "nosniff"
    rows = list(csv.DictReader(io.StringIO(admin.client.get("/ui/usage/report.csv?by=team").text)))
    told: UsageView = server.connection().ask("GET", "/usage", answer=UsageView, query={"by": "team"})
    assert {row["team"] for row in rows} == {one.key[0] for one in told.groups}
    assert admin.client.get("/ui/usage/report.parquet").content[:4] == b"PAR1"


def test_a_budget_can_be_created_changed_and_deleted(server: Served, admin: Reader) -> None:
    admin.post(
        "/budgets", name="web", kind="team", scope="vision", period="week", unit="money", amount="12.5", hard="yes"
    )
    page = admin.get("/budgets/web")
    assert 'value="12.5"' in page
    assert "Used up" in page
    admin.post("/budgets/web", kind="everything", period="month", unit="time", amount="100")
    found: BudgetList = server.connection().ask("GET", "/budgets", answer=BudgetList)
    (budget,) = [one for one in found.budgets if one.name == "web"]
    assert (budget.limit_gpu_ms, budget.hard, budget.kind) == (360_000_000, False, "everything")
    again = admin.post("/budgets", status=400, name="web", amount="1")
    assert 'role="alert"' in again
    wrong = admin.post("/budgets", status=400, name="typo", kind="team", scope="nobody", amount="1,5")
    assert 'value="nobody"' in wrong  # What was typed is still there.
    admin.post("/budgets/web/reopen", status=400)
    admin.post("/budgets/web/delete")
    admin.get("/budgets/web", status=404)


def test_a_reached_threshold_is_in_the_history_and_the_notices(admin: Reader) -> None:
    page = admin.get("/budgets")
    assert re.search(r"is at \d+ %|used up", page)
    names = re.findall(r'href="/ui/budgets/([\w-]+)"', page)
    assert any("80 %" in admin.get(f"/budgets/{name}").split("Reached thresholds")[1] for name in names)


def test_a_policy_can_be_created_attached_changed_and_deleted(admin: Reader) -> None:
    admin.post(
        "/policies",
        name="web",
        gpus_per_run="2",
        max_run="12h",
        priorities=["NORMAL", "BEST_EFFORT"],
        required_tags="project\nstage=dev,prod",
        default_tags="stage=dev",
        mandatory="yes",
    )
    page = admin.get("/policies/web")
    for rule in ("2 GPUs a run", "needs tag stage (dev, prod)", "adds tag stage=dev", "mandatory"):
        assert f"<li>{rule}</li>" in page, rule
    assert 'value="12h"' in page
    admin.post("/policies/web/attach", kind="team", holder="vision")
    refused = admin.post("/policies/web/delete", status=400)
    assert 'role="alert"' in refused
    assert "<td>vision</td>" in admin.get("/policies/web")
    admin.post("/policies/web/attach", status=404, kind="team", holder="nobody")
    admin.post("/policies/web/detach", kind="team", holder="vision")
    admin.post("/policies/web", gpus_per_run="4")
    assert "4 GPUs a run" in admin.get("/policies/web")
    bad = admin.post("/policies", status=400, name="bad", max_run="soon")
    assert 'value="soon"' in bad
    admin.post("/policies/web/delete")
    admin.get("/policies/web", status=404)


def test_a_price_can_be_set_planned_and_ended(admin: Reader) -> None:
    admin.post("/prices", resource="L4", amount="0.80")
    later = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=3)).strftime("%Y-%m-%dT%H:%M")
    admin.post("/prices", resource="L4", amount="0.70", since=later)
    page = admin.get("/prices")
    assert "0.80 USD per device" in page
    assert "planned" in page
    assert "<svg" in page.split("Prices over time")[1]
    unknown = admin.post("/prices", status=200, resource="Z9000", amount="1")
    assert "Z9000" in unknown
    planned = re.findall(r'name="resource" value="L4">.*?name="at_ns" value="(\d+)"', page)
    admin.post("/prices/end", resource="L4", at_ns=planned[0])
    assert "0.80 USD per device" in admin.get("/prices")
    assert "0.70 USD" not in admin.get("/prices").split("Set a price")[0]
    admin.post("/prices/end", resource="L4")
    assert "0.80 USD" not in admin.get("/prices").split("Set a price")[0]
    assert "ended" in admin.get("/prices?all=true")
    assert 'value="2,99"' in admin.post("/prices", status=400, resource="L4", amount="2,99")
    assert admin.client.get("/ui/prices/records.csv").headers["content-disposition"].startswith("attachment")


def test_a_secret_can_be_set_replaced_and_deleted_and_is_never_shown(admin: Reader) -> None:
    value = "hunter2-from-the-page"
    admin.post("/secrets", name="WEB_TOKEN", team="vision", value=value + "\r\n")
    admin.post("/secrets", name="WEB_TOKEN", team="vision", value=value)
    page = admin.get("/secrets?name=WEB_TOKEN&team=vision")
    assert 'value="WEB_TOKEN"' in page
    assert re.search(
        r'WEB_TOKEN</td>\s*<td>team vision</td>\s*<td class="number" data-name="version">1</td>', page
    )  # The same value.
    refused = admin.post("/secrets", status=400, name="not a name", value=value)
    assert value not in page + refused
    admin.post("/secrets/WEB_TOKEN/delete", team="vision")
    assert "WEB_TOKEN" not in admin.get("/secrets")


def test_environments_have_sizes_users_units_and_differences(admin: Reader) -> None:
    page = admin.get("/environments")
    for _ in range(20):  # The list reads only some snapshots at once.
        if "not read" not in page:
            break
        page = admin.get("/environments")
    addresses = re.findall(r'href="/ui/environments/([0-9a-f]{64})"', page)
    assert len(addresses) == 12
    one = admin.get(f"/environments/{addresses[0]}")
    assert "package-079" in one
    assert "/ui/runs/" in one
    assert "package-079" not in admin.get(f"/environments/{addresses[0]}?text=package-001").split("<h2>Units</h2>")[1]
    both = f"old={addresses[0]}&new={addresses[1]}"
    assert "package-000" in admin.get(f"/environments/diff?{both}")
    admin.get(f"/environments/diff?old={addresses[0]}&new=nothing", status=404)
    admin.get("/environments/" + "0" * 64, status=404)


def test_a_member_sees_only_the_runs_that_are_theirs_in_an_environment(server: Served) -> None:
    member = Reader(server, make_user(server, "mia", team="vision"))
    assert 'class="empty"' in member.get("/environments")
    admin = Reader(server)
    address = re.findall(r"/ui/environments/([0-9a-f]{64})", admin.get("/environments"))[0]
    assert "/ui/runs/" not in member.get(f"/environments/{address}")
    member.client.close()
    admin.client.close()


def test_long_lists_have_a_cursor(admin: Reader) -> None:
    for number in range(101):
        admin.post("/secrets", name=f"MANY_{number:03d}", value="x")
    first = admin.get("/secrets?text=MANY_")
    rest = admin.click(first, "Next 100")
    assert re.findall(r"(MANY_\d+)</td>", rest) == ["MANY_100"]
    assert "First page" in rest


def test_the_audit_can_be_searched_and_paged(admin: Reader) -> None:
    page = admin.get("/audit?who=ada&action=run.create")
    rows = re.findall(r'<td><a href="[^"]*who=(\w+)">', page)
    assert rows
    assert set(rows) == {"ada"}
    today = datetime.datetime.now(datetime.UTC).date()
    assert "<tbody>" in admin.get(f"/audit?from={today - datetime.timedelta(days=1)}&to={today}")
    assert "<tbody>" not in admin.get("/audit?from=2020-01-01&to=2020-01-02")
    first = re.findall(r'<td class="number">(\d+)</td>', admin.get("/audit?before=5"))
    assert [int(number) for number in first] == [4, 3, 2, 1]


def test_the_audit_chain_is_verified_and_exported(admin: Reader) -> None:
    page = admin.get("/audit/verification")
    assert "is intact:" in page
    broken = admin.get(f"/audit/verification?after=2&sha256={'0' * 64}")
    assert "is broken:" in broken
    lines = admin.client.get("/ui/audit/export.jsonl?who=ada")
    assert lines.headers["content-disposition"].startswith("attachment")
    assert all('"principal":"ada"' in line for line in lines.text.splitlines())
    rows = list(csv.DictReader(io.StringIO(admin.client.get("/ui/audit/export.csv").text)))
    assert [int(row["number"]) for row in rows][:12] == list(range(1, 13))


def test_the_server_page_has_parts_settings_and_a_drain(admin: Reader) -> None:
    page = admin.get("/server")
    for part in ("database", "scheduler", "Settings in force", "partition_grace", "gpu-000"):
        assert part in page, part
    admin.post("/server/drain", note="until <noon>")
    page = admin.get("/server")
    assert "until &lt;noon&gt;" in page
    admin.post("/server/resume")
    assert "Runs start" in admin.get("/server")


HOSTILE = (
    "<script>x()</script>",
    "<img src=x onerror=x()>",
    '" onfocus=x() autofocus="',
    "</title></textarea><svg/onload=x()>",
    "<hx-partial hx-target=body>",
    "{{7*7}}",
    "{% raw %}",
    "javascript:x()",
    "\u202eevil",
    "=1+1",
    "a,b=c%2C",
)


class Elements(html.parser.HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.targets: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.targets |= {value or "" for name, value in attrs if name in ("href", "src", "action")}


def test_what_people_wrote_is_only_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("hostile")
    with filled_with_hostile_names(home, HOSTILE) as running:
        reader = Reader(running)
        usual = Elements(reader.get("/usage?by=pool"))
        paths = [f"/usage?by={by}" for by in ("user", "name", "gpu_type", "tag:stage", "policy", "chargeback")]
        key = urllib.parse.quote(f"tag:{HOSTILE[2]}")
        for path in (
            *paths,
            f"/usage?by={key}",
            "/audit",
            "/prices",
            "/usage?by=name&name=" + urllib.parse.quote(HOSTILE[0]),
        ):
            page = reader.get(path)
            seen = Elements(page)
            assert not seen.tags & {"img", "hx-partial"}, path
            assert not {name for name in seen.attributes if name.startswith("on") or name == "autofocus"}, path
            assert all(target.startswith(("/ui", "#")) for target in seen.targets), path
            assert seen.tags - usual.tags <= {"b", "code", "details", "option", "select", "summary", "time"}, path
        shown = html.unescape(reader.get("/usage?by=name&rows=1000"))
        assert [text for text in HOSTILE if text not in shown] == []
        rows = list(csv.reader(io.StringIO(reader.client.get("/ui/usage/report.csv?by=name").text)))
        assert "'=1+1" in {row[0] for row in rows}
        # Each group's links select exactly this group again.
        for text in HOSTILE:
            page = reader.get(f"/usage?by=user&{urllib.parse.urlencode({'name': text})}")
            assert 'id="total-cost">3.00 USD' in page, text
            one = urllib.parse.urlencode({"tag": write_by([f"stage={text}"])})
            assert 'id="total-cost">3.00 USD' in reader.get(f"/usage?by=user&{one}"), text
        reader.client.close()
