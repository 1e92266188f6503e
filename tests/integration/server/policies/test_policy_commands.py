"""`sgpu policy` against a real server: what it changes, what it prints, and who may."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result

from serverless_gpu.cli import program
from serverless_gpu.errors import InvalidValue, NotAllowed, NotFound
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade, TokenRequest
from tests.support.golden import golden
from tests.support.server.served import Served

Said = Callable[..., Result]


@pytest.fixture
def said(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Said]:
    """Yield what runs `sgpu` as the administrator, or with another token."""
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)

    def run(*arguments: str, token: str = "") -> Result:
        monkeypatch.setenv("SERVERLESS_GPU_TOKEN", token or server.token)
        return CliRunner().invoke(program.sgpu, arguments, catch_exceptions=False, prog_name="sgpu")

    yield run


def test_a_policy_is_made_and_changed_as_far_as_is_said(said: Said) -> None:
    made = said(
        *("policy", "set", "llm", "--require-tag", "team=a,b", "--require-tag", "cost", "--default-tag", "team=a"),
        *("--gpu-types", "h100, A10", "--gpus-per-run", "8", "--gpus-at-once", "16", "--max-run", "7d"),
        *("--idle", "30m", "--priorities", "normal,BEST_EFFORT"),
    )
    assert made.stdout == golden("server.policy_commands.policy-llm-any")
    # What is not said stays; `any` takes a limit away.
    changes = ("--gpus-per-run=any", "--max-run=2h", "--idle=any", "--require-tag=team", "--gpu-types=any")
    assert said("policy", "set", "llm", *changes, "--priorities", "any").stdout == golden(
        "server.policy_commands.policy-llm-any-demand"
    )
    assert said("policy", "set", "free", "--gpus-per-run=1").stdout == golden("server.policy_commands.policy-free-any")
    assert said("policy", "set", "free", "--gpus-per-run=any").stdout == golden(
        "server.policy_commands.policy-free-any-demand"
    )


def test_a_policy_is_attached_and_seen_by_whom_it_is_for(server: Served, said: Said) -> None:
    admin = server.connection()
    admin.ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
    bob = admin.ask("POST", "/users", PrincipalRequest(name="bob", teams=("search",)), answer=TokenMade).secret
    said("policy", "set", "free")
    said("policy", "set", "llm", "--require-tag", "team", "--gpus-at-once", "16")
    says = "any on-demand pool; needs tag team; 16 GPUs at once"
    assert said("policy", "mine", token=bob).stdout.splitlines()[1:] == [
        golden("server.policy_commands.free-any-demand"),
        f"llm     -            {says}",
        golden("server.policy_commands.policy-attached-you"),
    ]
    attached = said("policy", "attach", "llm", "--team", "search", "--user", "bob").stdout
    assert attached == golden("server.policy_commands.policy-llm-attached")
    assert said("policy", "mine", token=bob).stdout.splitlines()[-1] == golden(
        "server.policy_commands.llm-applies-itself"
    )
    assert said("policy", "show", "llm", token=bob).stdout.splitlines() == [
        "policy llm",
        "  any on-demand pool",
        "  needs tag team",
        "  16 GPUs at once",
        golden("server.policy_commands.attached-team-search"),
    ]
    said("policy", "attach", "free", "--user", "bob")
    assert "choose a policy" in said("policy", "mine", token=bob).stdout
    shown = msgspec.json.decode(said("policy", "show", "llm", "--json", token=bob).stdout)
    assert shown["holders"] == [{"kind": "team", "name": "search"}, {"kind": "user", "name": "bob"}]
    # A token that may only submit can ask which are its own, and change nothing.
    scoped = server.connection(bob).ask("POST", "/tokens", TokenRequest(scopes=("submit",)), answer=TokenMade).secret
    assert msgspec.json.decode(said("policy", "mine", "--json", token=scoped).stdout)[1]["name"] == "llm"
    for token in (bob, scoped):
        for change in (("set", "llm"), ("detach", "llm", "--user", "bob"), ("delete", "llm")):
            with pytest.raises(NotAllowed):
                said("policy", *change, token=token)
    with pytest.raises(InvalidValue, match=re.escape(golden("server.policy_commands.attached-team-search-other"))):
        said("policy", "delete", "llm")
    assert said("policy", "detach", "llm", "--team", "search", "--user", "bob").stdout == golden(
        "server.policy_commands.policy-llm-attached-2"
    )
    assert said("policy", "delete", "llm").stdout == golden("server.policy_commands.policy-llm-gone")
    with pytest.raises(NotFound, match="no policy 'llm'"):
        said("policy", "show", "llm")


def test_22D3_a_policy_is_made_mandatory_and_its_holders_see_that(server: Served, said: Said) -> None:
    admin = server.connection()
    bob = admin.ask("POST", "/users", PrincipalRequest(name="bob"), answer=TokenMade).secret
    made = said(
        *("policy", "set", "house", "--mandatory", "--attempts", "5", "--total-run", "2d"),
        *("--unsaved-attempts", "1", "--gpus-per-run", "4"),
    )
    assert made.stdout == golden("server.policy_commands.policy-house-mandatory")
    said("policy", "set", "free")
    said("policy", "attach", "house", "--user", "bob")
    *rows, always, other = said("policy", "mine", token=bob).stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["POLICY", "free", "house"]
    assert always == golden("server.policy_commands.house-applies-every")
    assert other.startswith("no other policy is attached to you")
    changed = said(
        "policy", "set", "house", "--optional", "--attempts=any", "--total-run=any", "--unsaved-attempts=any"
    )
    assert changed.stdout == golden("server.policy_commands.policy-house-any")
    assert said("policy", "mine", token=bob).stdout.splitlines()[-1] == golden(
        "server.policy_commands.house-applies-itself"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("set", "p", "--attempts", "few"), "'few' is not a number of attempts"),
        (("attach", "p"), "name a holder of the policy: --user, --service or --team"),
        (("set", "p", "--gpus-per-run", "many"), "'many' is not a number of GPUs"),
        (("set", "p", "--max-run", "long"), "'long' is not a duration"),
        (
            ("set", "p", "--priorities", "URGENT"),
            "'URGENT' is not a priority class; use one of CRITICAL, NORMAL, BEST_EFFORT",
        ),
        (("set", "p", "--default-tag", "team"), "'team' is not a tag of the form KEY=VALUE"),
        (("set", "p", "--require-tag", "team="), "the tag 'team=' accepts no value; use 'team' to accept any value"),
    ],
)
def test_what_does_not_read_like_an_option_is_said(said: Said, arguments: tuple[str, ...], says: str) -> None:
    done = said("policy", *arguments)
    assert done.exit_code == 2 and says in done.output


def test_22D7_a_policy_s_time_limit_and_team_are_set_and_taken_away(server: Served, said: Said) -> None:
    server.connection().ask("POST", "/teams", TeamRequest(name="ads"), answer=TeamView)
    made = said("policy", "set", "p", "--timeout", "2h", "--team", "ads", "--require-team").stdout
    says = "any on-demand pool; default time limit 2 h 00 min; default team ads; needs a team"
    assert made == f"policy p: {says}\n"
    taken = said("policy", "set", "p", "--timeout", "any", "--team", "any", "--no-require-team").stdout
    assert taken == golden("server.policy_commands.policy-any-demand")
