"""Which run a person means, where a server has many."""

from __future__ import annotations

import re

import pytest

import serverless_gpu
from serverless_gpu.ambient import new_run_id
from serverless_gpu.cli.runs import run_location
from serverless_gpu.cli.runs.run_location import locate
from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.client.remote.server import close_all
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.base.home import Home
from serverless_gpu.wire.access import PrincipalRequest, TokenMade
from tests.support.golden import golden
from tests.support.server.runs_api import submit
from tests.support.server.served import Served


@pytest.fixture
def logged_in(server: Served) -> Home:
    write_profile(server.home, ServerProfile(url=server.url, token=server.token))
    return Home(server.home)


def test_a_run_is_found_by_its_identifier_or_its_beginning_however_many_came_later(
    server: Served, logged_in: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_location, "PAGE", 2)
    connection = server.connection()
    made = [submit(connection).id for _ in range(5)]
    assert [locate(logged_in, run_id).run_id for run_id in made] == made
    assert [locate(logged_in, run_id[:24].upper()).run_id for run_id in made] == made
    assert locate(logged_in, made[0]).view is not None
    assert locate(logged_in, made[-1][-9:]).run_id == locate(logged_in, None).run_id == made[-1]
    with pytest.raises(InvalidValue, match="means 5 runs"):
        locate(logged_in, made[0][:6])


def test_a_run_that_is_nowhere_is_said_to_be_neither_here_nor_at_the_server(server: Served, logged_in: Home) -> None:
    theirs = submit(server.connection()).id
    bob = server.connection().ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade)
    write_profile(server.home, ServerProfile(url=server.url, token=bob.secret))
    for run_id in (theirs, new_run_id(), "nothing"):
        with pytest.raises(InvalidValue, match=golden("server.locating.run-none-you", url=server.url)):
            locate(logged_in, run_id)
    with pytest.raises(InvalidValue, match=re.escape(golden("server.locating.none-server-you"))):
        serverless_gpu.attach(theirs)
    close_all()
