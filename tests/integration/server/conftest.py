"""The databases of tests: SQLite in a file and PostgreSQL, in turn; and a server's parts on them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serverless_gpu.ambient import SystemClock
from serverless_gpu.server.composition import Services
from serverless_gpu.server.db.database import Database
from serverless_gpu.testing import FakeClock
from tests.support.server.made import made_services
from tests.support.server.postgres import Cluster, cluster
from tests.support.server.served import Served, served
from tests.support.server.sharing import shared_pools

__all__ = ["shared_pools"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to `make test-long` what PostgreSQL adds little to: tests marked `any_database`, and cases after the first.

    A test has all its cases on SQLite, and its first one on PostgreSQL, unless it is marked `every_case`.
    """
    begun: set[str] = set()
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("database_url") != "postgresql":
            continue
        test = item.nodeid.partition("[")[0]
        is_later = test in begun and not item.get_closest_marker("every_case")
        begun.add(test)
        if is_later or item.get_closest_marker("any_database"):
            item.add_marker("long")


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """Yield a PostgreSQL that all tests of this process share."""
    with cluster() as running:
        yield running


@pytest.fixture(scope="session")
def postgres_template(postgres: Cluster) -> str:
    """Return the name of a database that has the tables and nothing in them."""
    name = postgres.new_database()
    database = Database(postgres.url(name), clock=SystemClock())
    database.migrate()
    database.close()
    return name


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a database file that has the tables and nothing in them."""
    path = tmp_path_factory.mktemp("template") / "server.db"
    database = Database(f"sqlite:///{path}", clock=SystemClock())
    database.migrate()
    database.close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the url of a database that has the tables and nothing in them, of each kind in turn."""
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")
        yield f"sqlite:///{shutil.copy(template, tmp_path / 'server.db')}"
        return
    postgres: Cluster = request.getfixturevalue("postgres")
    name = postgres.new_database(request.getfixturevalue("postgres_template"))
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """Yield a database that has the tables."""
    opened = Database(database_url, clock=SystemClock())
    opened.migrate()
    yield opened
    opened.close()


@pytest.fixture
def open_again(database_url: str) -> Iterator[Callable[[], Database]]:
    """Yield a function that opens the same database once more, as a server does that starts again."""
    opened: list[Database] = []

    def open_one() -> Database:
        opened.append(Database(database_url, clock=SystemClock()))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def clock() -> FakeClock:
    """Return a clock that the test moves."""
    return FakeClock()


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    """Return the parts of a server, on the test's clock."""
    return made_services(database, tmp_path, clock=clock)


@pytest.fixture
def server(home: Path) -> Iterator[Served]:
    """Yield a real server on loopback, with a home and a token of its own."""
    with served(home) as running:
        yield running
