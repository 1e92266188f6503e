"""`sgpu queue`, `pool`, `share`, `policy` against a real server: what they print, and who may."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from click.testing import CliRunner

from serverless_gpu.ambient import format_soon
from serverless_gpu.cli import pools, program
from serverless_gpu.errors import InvalidValue, NotAllowed
from serverless_gpu.model.scheduling.values import Wait, WaitReason
from serverless_gpu.model.spec import Priority
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade
from serverless_gpu.wire.queue import QueueEntry, wait_view
from serverless_gpu.wire.runs import RunView
from tests.support.golden import golden
from tests.support.server.served import Served
from tests.support.server.submitting import request

Said = Callable[..., str]
NOW = 1_900_000_000_000_000_000


@pytest.fixture
def said(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """Yield what runs `sgpu` as the administrator, or with another token, and returns what it printed."""
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)

    def run(*arguments: str, token: str = "") -> str:
        monkeypatch.setenv("SERVERLESS_GPU_TOKEN", token or server.token)
        done = CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")
        assert done.exit_code == 0, done.output
        return done.stdout

    yield run


def test_27_network_policies_are_set_shown_and_emptied(said: Said) -> None:
    told = said(
        "pool", "set", "--isolation", "sandbox", "--egress", "pool", "--allow", "PyPI.org:443", "--allow", "::1"
    )
    assert told.splitlines()[-1] == golden("server.egress.told-pool")
    assert [line.split() for line in said("pool", "show").splitlines() if "allow" in line or "egress" in line] == [
        ["egress", "pool"],
        ["allow", "pypi.org:443"],
        ["allow", "::1"],
    ]
    assert "  pool  " in said("pool", "list")
    told = said("pool", "set", "--egress", "none", "--allow-nothing")
    assert told.splitlines()[-1] == golden("server.egress.told-none")
    both = CliRunner().invoke(program.sgpu, ["pool", "set", "--allow", "a", "--allow-nothing"], prog_name="sgpu")
    assert both.exit_code == 2
    with pytest.raises(InvalidValue, match="no pool 'none'"):
        said("pool", "show", "none")


def test_pools_shares_and_policies_are_set_and_listed_by_who_may(server: Served, said: Said) -> None:
    admin = server.connection()
    admin.ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    bob = admin.ask("POST", "/users", PrincipalRequest(name="bob", teams=("search",)), answer=TokenMade).secret
    assert said("pool", "set", "lab 1", "--reserved", "--lend", "--return", "2m") == golden(
        "server.dividing_commands.lab-reserved-lends"
    )
    assert said("pool", "set", "lab 1", "--no-lend") == golden("server.dividing_commands.lab-reserved-nodes")
    assert "lab 1" in said("pool", "list", token=bob)
    assert "all shares are equal" in said("share", "list")
    assert said("share", "set", "team", "search", "70") == "team search has weight 70\n"
    assert said("share", "set", "user", "bob", "0.5") == "user bob has weight 0.5\n"
    for token in ("", bob):
        assert said("share", "list", token=token).splitlines() == [
            golden("server.dividing_commands.kind-name-weight"),
            golden("server.dividing_commands.team-search-70"),
            "user  bob     0.5     -       -                   -           -",
            golden("server.dividing_commands.use-counts-half"),
        ]
    assert said("share", "delete", "user", "bob") == golden("server.dividing_commands.user-bob-again")
    assert said("policy", "set", "nightly", "--pool", "lab 1") == golden("server.dividing_commands.policy-nightly-pool")
    assert said("policy", "list", token=bob) == golden("server.dividing_commands.policy-attached-says")
    for arguments in (("share", "set", "team", "search", "99"), ("policy", "delete", "nightly")):
        with pytest.raises(NotAllowed):
            said(*arguments, token=bob)
    assert said("policy", "delete", "nightly") == golden("server.dividing_commands.policy-nightly-gone")
    assert said("policy", "list", "--json") == "[]\n"


def test_the_queue_is_listed_as_far_as_one_may_see_it(server: Served, said: Said) -> None:
    admin = server.connection()
    bob = admin.ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade).secret
    assert said("queue") == "no runs are waiting\n" and said("queue", "--mine", token=bob) == golden(
        "server.dividing_commands.none-your-runs"
    )
    said("pool", "set", "lab", "--reserved")
    asked = request(name="fit", pool="lab")
    admin.ask("POST", "/runs", asked, answer=RunView)
    told = said("queue", "--limit", "1").splitlines()
    assert len(told) == 2
    assert told[0].split() == ["PLACE", "RUN", "OWNER", "TEAM", "CLASS", "NEEDS", "WAITS", "RESERVED", "WHY"]
    assert told[1].startswith(f"-      {asked.id} fit") and golden("server.dividing_commands.every-gpu-lab") in told[1]
    assert asked.id not in said("queue", token=bob) and golden("server.dividing_commands.every-gpu-lab") in said(
        "queue", token=bob
    )
    assert said("queue", "--mine", token=bob) == golden("server.dividing_commands.none-your-runs")
    assert msgspec.json.decode(said("queue", "--json"))["waiting"] == 1


def test_a_place_in_the_queue_stands_beside_a_run_and_nobody_is_told_that_it_is_theirs() -> None:
    wait = Wait(run_id="r1", reason=WaitReason.CAPACITY, count=8, gpu_type="H100", node="n3", at_ns=NOW, place=2)
    entry = QueueEntry(
        run="r1",
        name="fit",
        owner="bob",
        team="",
        priority=Priority.NORMAL,
        place=2,
        gpus=8,
        gpu_type="H100",
        pool="",
        since_ns=NOW,
        sentence="in words of the server's place; you are 2nd",
        reserved_ns=NOW,
        waiting=wait_view(wait),
    )
    place, *_, reserved, why = pools.queue_row(entry, NOW)
    assert (place, reserved) == ("2", f"about {format_soon(NOW)}")
    assert why == golden("server.dividing_commands.needs-h100-one", format_soon=format_soon(NOW))


@pytest.mark.parametrize(("weight", "told"), [("nan", "nan"), ("inf", "inf"), ("-1", "-1.0"), ("0", "0.0")])
def test_a_share_that_is_none_is_told_as_one(said: Said, weight: str, told: str) -> None:
    with pytest.raises(InvalidValue, match=golden("server.dividing_commands.share-cannot", told=told)):
        said("share", "set", "team", "search", weight)
