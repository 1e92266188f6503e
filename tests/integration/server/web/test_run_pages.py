"""Pages of runs without a browser: rights, outcomes of forms, downloads, and strings that try to become markup."""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.model.lifecycle.attempt import Failure, Reason, State, Stopped
from serverless_gpu.wire.agents import Ending, File, Report
from serverless_gpu.wire.runs import RunPage, RunView, StopRequest
from tests.support.server.played import Played
from tests.support.server.runs_api import request
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user, sign_in_path

WAIT_S = 30
TABS = ("", "/files", "/environment", "/receipt", "/spec")
ODD = (
    "<script>x()</script>",
    "<img src=x onerror=x()>",
    '" onfocus=x() autofocus="',
    "' style='",
    "</pre></textarea><b>",
    "<hx-partial hx-target=body>",
    "{{7*7}}{% x %}",
    "</script><!--",
    "javascript:x()",
    "\u202e\u200b\u0301",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server for the tests of this file, which each submit runs of their own."""
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


_MARKUP = ("b", "base", "hx-partial", "iframe", "img", "style", "svg")


class _Reader(HTMLParser):
    """Collects what a browser would run or load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag in ("b", "base", "hx-partial", "iframe", "img", "style", "svg") or (
            tag == "script" and "src" not in named
        ):
            self.found.append(tag)
        self.found += [name for name in named if name.startswith(("on", "hx-on")) or name in ("style", "autofocus")]
        address = (named.get("href") or named.get("src") or named.get("action") or "/").strip()
        if not address.startswith(("/", "#", "https:")):
            self.found.append(address)


def active_parts(text: str) -> list[str]:
    """Return the parts of a page that someone's text must never become."""
    reader = _Reader()
    reader.feed(text)
    return reader.found


class Person:
    """A user with a browser and a connection to the API."""

    def __init__(self, server: Served, name: str, *, role: str = "member", team: str = "") -> None:
        self.token = make_user(server, name, role=role, team=team)
        self.api = server.connection(self.token)
        self.browser = httpx2.Client(base_url=server.url, timeout=WAIT_S, headers={"Origin": server.url})
        self.browser.get(sign_in_path(server, self.token))

    def submit(self, **fields: Any) -> RunView:
        arguments = fields.pop("arguments", None)
        asked = msgspec.structs.replace(request(**fields), arguments=arguments)
        made: RunView = self.api.ask("POST", "/runs", asked, answer=RunView)
        return made

    def post(self, path: str, **data: Any) -> httpx2.Response:
        found = re.search(r'name="csrf" value="(\w+)"', self.browser.get("/ui/runs").text)
        assert found is not None
        return self.browser.post(path, data={"csrf": found[1], **data})

    def runs(self, **query: str) -> RunPage:
        found: RunPage = self.api.ask("GET", "/runs", query=query, answer=RunPage)
        return found


@pytest.fixture
def person(server: Served, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Yield a function that makes a user whose name no other test has."""
    made: list[Person] = []

    def make(name: str, **fields: Any) -> Person:
        made.append(Person(server, f"{name}-{new_run_id()[-8:]}", **fields))
        return made[-1]

    yield make
    for one in made:
        one.browser.close()


def test_every_part_of_anothers_run_is_missing(person: Any) -> None:
    ann, eve = person("ann"), person("eve")
    run, own = ann.submit(name="private-name"), eve.submit()
    paths = [f"/ui/runs/{run.id}{tab}" for tab in (*TABS, "/download/receipt.json")]
    for path in (*paths, f"/ui/compare?runs={own.id},{run.id}"):
        answer = eve.browser.get(path)
        assert (answer.status_code, "private-name" in answer.text) == (404, False), path
        stream = eve.browser.get(path, headers={"Accept": "text/event-stream", "HX-Request": "true"})
        assert stream.status_code == 404, path
    for action in ("stop", "again"):
        assert eve.post(f"/ui/runs/{run.id}/{action}").status_code == 404
    assert ann.api.ask("GET", f"/runs/{run.id}", answer=RunView).stop is None
    assert "private-name" not in eve.browser.get("/ui/runs", params={"q": "private"}).text
    assert "private-name" not in eve.browser.get("/ui/stopped-runs", params={"runs": run.id}).text


def test_a_viewer_has_no_buttons_that_change_runs_and_their_forms_are_refused(person: Any) -> None:
    ann, vic = person("ann", team="search"), person("vic", role="viewer", team="search")
    run = ann.submit(team="search")
    for path in ("/ui/runs", f"/ui/runs/{run.id}"):
        text = vic.browser.get(path).text
        assert 'value="stop"' not in text and "/stop" not in text and "/again" not in text, path
    for action in ("stop", "again"):
        assert vic.post(f"/ui/runs/{run.id}/{action}").status_code in (403, 404)
    assert vic.post("/ui/runs/selected", runs=run.id, action="stop").status_code in (403, 404)
    assert ann.api.ask("GET", f"/runs/{run.id}", answer=RunView).stop is None


def test_a_run_is_cancelled_once_and_a_late_form_says_that_it_had_ended(person: Any) -> None:
    ann = person("ann")
    run = ann.submit()
    assert f'action="/ui/runs/{run.id}/stop"' in ann.browser.get(f"/ui/runs/{run.id}").text
    assert ann.post(f"/ui/runs/{run.id}/stop", reason="cancel").headers["location"] == f"/ui/runs/{run.id}"
    assert ann.api.ask("GET", f"/runs/{run.id}", answer=RunView).state is State.CANCELLED
    late = ann.post(f"/ui/runs/{run.id}/stop", reason="preempt")
    assert late.headers["location"].endswith("?told=ended")
    page = ann.browser.get(late.headers["location"]).text
    assert 'class="notice"' in page
    assert f'action="/ui/runs/{run.id}/stop"' not in page


def test_a_run_is_run_again_once_for_one_form(person: Any) -> None:
    ann = person("ann")
    run = ann.submit(name="again")
    found = re.search(r'name="id" value="(\w{26})"', ann.browser.get(f"/ui/runs/{run.id}").text)
    assert found is not None
    for _ in range(2):
        answer = ann.post(f"/ui/runs/{run.id}/again", id=found[1])
        assert answer.headers["location"] == f"/ui/runs/{found[1]}?told=again"
    assert [one.id for one in ann.runs(name="again").runs] == [found[1], run.id]


def test_selected_runs_are_stopped_or_compared(person: Any) -> None:
    ann, bob = person("ann", team="search"), person("bob", team="search")
    own, shared = ann.submit(), bob.submit(team="search")
    ended = ann.submit()
    ann.api.ask("POST", f"/runs/{ended.id}/stop", StopRequest(), answer=RunView)
    answer = ann.post("/ui/runs/selected", runs=[own.id, shared.id, ended.id], action="stop")
    page = ann.browser.get(answer.headers["location"]).text
    assert "Stopped." in page and f"Ask {bob.runs().runs[0].owner}" in page
    assert ann.api.ask("GET", f"/runs/{own.id}", answer=RunView).state is State.CANCELLED
    assert bob.api.ask("GET", f"/runs/{shared.id}", answer=RunView).stop is None
    compared = ann.post("/ui/runs/selected", runs=[own.id, shared.id], action="compare").headers["location"]
    assert parse_qs(urlsplit(compared).query)["runs"] == [f"{own.id},{shared.id}"]
    assert ann.browser.get(compared).text.count("<table") >= 2
    assert ann.browser.get("/ui/compare", params={"runs": [own.id, shared.id]}).status_code == 200
    assert ann.post("/ui/runs/selected", action="stop").status_code == 400
    assert ann.browser.get("/ui/compare").status_code == 200


def test_filters_stay_in_every_link_and_field(person: Any) -> None:
    ann = person("ann")
    for number in range(3):
        ann.submit(name=f"n{number}", tags={"k": "v"})
    query = {
        "q": "n",
        "tag": "k=v",
        "state": "QUEUED",
        "type": "cpu",
        "from": "2020-01-01",
        "cols": "tags",
        "limit": "2",
    }
    page = ann.browser.get("/ui/runs", params=query).text
    found = re.search(r'rel="next" href="([^"]+)"', page)
    assert found is not None
    address = found[1].replace("&amp;", "&")
    following = parse_qs(urlsplit(address).query)
    assert {name: following[name] for name in query} == {name: [value] for name, value in query.items()}
    second = ann.browser.get(address).text
    assert second.count('name="runs"') == 1 and 'rel="prev"' in second
    assert page.count('class="tag"') == 2 and ">Owner</th>" not in page
    assert ann.browser.get("/ui/runs", params={"to": "2020-01-01"}).text.count('name="runs"') == 0
    for bad in ({"from": "today"}, {"sort": "x"}, {"cursor": "a.b"}, {"state": "odd"}, {"nothing": "1"}):
        assert ann.browser.get("/ui/runs", params=bad).status_code == 400, bad


@pytest.mark.parametrize("odd", ODD)
def test_names_tags_and_arguments_stay_text(person: Any, odd: str) -> None:
    ann = person("ann")
    plain = odd.replace("\u202e", "")  # The server refuses direction marks in names.
    run = ann.submit(name=plain, tags={plain: plain}, arguments={odd: odd})
    other = ann.submit(name=plain, tags={"k": plain}, arguments={odd: odd + "2"})
    pages = (
        "/ui/runs?cols=tags",
        *(f"/ui/runs/{run.id}{tab}" for tab in TABS),
        f"/ui/compare?runs={run.id},{other.id}",
    )
    for path in pages:
        text = ann.browser.get(path).text
        assert active_parts(text) == [], path
        assert plain in html.unescape(text), path


@pytest.fixture
def playing(tmp_path: Path) -> Iterator[tuple[Person, Played]]:
    """Yield a user and a node that the test plays, on a server without other runs."""
    with served(tmp_path) as running:
        ann = Person(running, "ann")
        with contextlib.closing(ann.browser):
            yield ann, Played(running)


def test_a_failure_and_its_files_stay_text(playing: tuple[Person, Played]) -> None:
    ann, node = playing
    run = ann.submit(name="fails")
    node.join()
    start = node.order()
    odd = "".join(ODD)
    record = msgspec.json.encode({"type": odd, "module": "m", "message": odd, "traceback": odd, "notes": [odd]})
    cause = Failure(rank=0, reason=Reason.RANK_RAISED, at_ns=1, detail=odd)
    stopped = Stopped(state=State.FAILED, reason=Reason.RANK_RAISED, cause=cause, consequences=(), log_tail=odd)
    node.report(start, Report(state=State.RUNNING, world_size=1, exec_ns=5))
    files = (File(name="failures/0.json", size=len(record), inline=record), File(name="x.html", size=3, inline=b"<b>"))
    ending = Ending(
        state=State.FAILED, reason=Reason.RANK_RAISED, began=True, stopped=msgspec.Raw(msgspec.json.encode(stopped))
    )
    node.report(start, Report(state=State.STOPPING, world_size=1, files=files, ending=ending))
    text = ann.browser.get(f"/ui/runs/{run.id}").text
    assert html.unescape(text).count(odd) >= 4
    assert active_parts(text) == []
    answer = ann.browser.get(f"/ui/runs/{run.id}/download/x.html")
    assert answer.content == b"<b>"
    assert answer.headers["content-disposition"].startswith("attachment;")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert 'href="/ui/runs/' + run.id + '/download/x.html?fence=1"' in ann.browser.get(f"/ui/runs/{run.id}/files").text
    for name in ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "nothing.txt", "a%0d%0aX: y"):
        assert ann.browser.get(f"/ui/runs/{run.id}/download/{name}").status_code in (400, 404), name


def test_only_web_links_become_links(playing: tuple[Person, Played]) -> None:
    ann, node = playing
    run = ann.submit(name="tracked")
    node.join()
    start = node.order()
    for link, is_link in (("javascript:x()", False), ("https://mlflow/#/run", True)):
        node.report(start, Report(state=State.RUNNING, world_size=1, exec_ns=5, tracked=link))
        assert (f'href="{link}"' in ann.browser.get(f"/ui/runs/{run.id}").text) == is_link
