"""Names, tags and messages of the corpus are text on every page: no script, no request, no other elements."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import sqlalchemy as sa
from playwright.sync_api import Browser

from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database
from tests.support.server.served import Served, served
from tests.support.web.browser import reader
from tests.support.web.filled import Filling, filled
from tests.support.web.hostile import CORPUS, NAMES

COUNTED = "#rows *"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server whose runs, nodes and messages are named by the corpus."""
    home = tmp_path_factory.mktemp("hostile")
    runs = len(CORPUS) + 20
    with filled(home, Filling(runs=runs, nodes=40, active=8, queued=8, days=2)):
        pass
    database = Database(f"sqlite:///{home / 'server' / 'server.db'}", clock=SystemClock())

    def write(connection: sa.Connection) -> None:
        ids = connection.scalars(sa.select(tables.runs.c.id).order_by(tables.runs.c.id.desc())).all()
        for at, run in enumerate(ids):
            name, told = NAMES[at % len(NAMES)], CORPUS[at % len(CORPUS)]
            tags = json.dumps({"project": name[:60]})
            values = {"name": name, "detail": told, "tags_json": tags}
            connection.execute(sa.update(tables.runs).where(tables.runs.c.id == run).values(values))
            events = sa.update(tables.events).where(tables.events.c.run_id == run).values(sentence=told)
            connection.execute(events)
        for at, node in enumerate(connection.scalars(sa.select(tables.nodes.c.id)).all()):
            named = NAMES[at].replace("/", "∕")
            connection.execute(sa.update(tables.nodes).where(tables.nodes.c.id == node).values(name=named))

    database.write(write)
    database.close()
    with served(home) as running:
        yield running


def test_the_corpus_is_large() -> None:
    assert len(CORPUS) >= 200


@pytest.mark.parametrize("path", ["/ui/", "/ui/runs?limit=500", "/ui/queue", "/ui/nodes", "/ui/usage?by=name"])
def test_a_page_shows_the_corpus_as_text(chromium: Browser, hostile: Served, path: str) -> None:
    with reader(chromium, hostile) as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path)
        page.wait_for_selector("main")
        assert [url for url in requests if not url.startswith(hostile.url)] == []
        assert page.evaluate("typeof x") == "undefined"
        assert page.locator("main script, main iframe, main base, main style, main img, main object").count() == 0
        assert page.locator("[hx-get], [data-hx-post], [hx-swap-oob]").count() == 0


def test_pages_of_runs_show_the_corpus_as_text(chromium: Browser, hostile: Served) -> None:
    with reader(chromium, hostile) as page:
        page.goto("/ui/runs?limit=40")
        runs = page.eval_on_selector_all("input[name=runs]", "boxes => boxes.map(box => box.value)")
        paths = [f"/ui/runs/{run}" for run in runs]
        paths += [f"{paths[0]}/{tab}" for tab in ("files", "environment", "receipt", "spec")]
        for path in (*paths, f"/ui/compare?runs={','.join(runs[:8])}", f"/ui/stopped-runs?runs={','.join(runs)}"):
            page.goto(path)
            assert page.evaluate("typeof x") == "undefined", path
            assert page.locator("main script, main iframe, main base, main style, main img, main b").count() == 0, path
            assert page.locator("[hx-get], [data-hx-post], [hx-swap-oob]").count() == 0, path


def test_names_are_visible_as_they_were_typed(chromium: Browser, hostile: Served) -> None:
    with reader(chromium, hostile) as page:
        page.goto("/ui/runs?limit=500")
        shown = set(page.eval_on_selector_all("main td a", "links => links.map(link => link.textContent)"))
    assert len(shown & set(NAMES)) > 0.9 * len(NAMES)


def test_live_parts_of_a_stream_are_as_inert_as_the_page(chromium: Browser, hostile: Served) -> None:
    with reader(chromium, hostile, java_script_enabled=False) as page:
        page.goto("/ui/runs?limit=500")
        before = page.locator(COUNTED).count()
    with reader(chromium, hostile) as page:
        page.add_init_script("addEventListener('htmx:after:swap', () => document.body.classList.add('swapped'))")
        page.goto("/ui/runs?limit=500")
        page.wait_for_selector("body.swapped")
        assert page.locator(COUNTED).count() == before
