"""`sgpu budget set` against a real server: how much that is, what stays as it is, and what does not read like it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from click.testing import CliRunner, Result

from serverless_gpu.cli import program
from serverless_gpu.wire.billing import BudgetView
from tests.support.golden import golden
from tests.support.server.served import Served

Said = Callable[..., Result]


@pytest.fixture
def said(server: Served, monkeypatch: pytest.MonkeyPatch) -> Said:
    """Return what runs `sgpu budget` as the administrator."""
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", server.token)

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(program.sgpu, ["budget", *arguments], catch_exceptions=False, prog_name="sgpu")

    return run


def shown(said: Said, name: str) -> BudgetView:
    return msgspec.json.decode(said("show", name, "--json").stdout, type=BudgetView)


def test_what_is_not_said_of_a_budget_stays_as_it_is(said: Said) -> None:
    said("set", "llm", "--tag", "project=llm", "--money", "500.000001", "--per", "week")
    made = shown(said, "llm")
    assert (made.limit_micros, made.period.value, made.hard) == (500_000_001, "week", False)
    assert golden("server.budget_commands.100-runs-stopped") in said("set", "llm", "--hard").stdout
    after = shown(said, "llm")
    assert (after.limit_micros, after.kind, after.period, after.hard) == (500_000_001, "tag", made.period, True)
    said("set", "llm", "--gpu-hours", "0.333333")  # of another kind: the other limit goes
    after = shown(said, "llm")
    assert (after.limit_gpu_ms, after.limit_micros, after.hard, after.scope) == (1_199_999, None, True, "project=llm")
    said("set", "llm", "--everything", "--soft", "--per", "day")
    after = shown(said, "llm")
    assert (after.kind, after.scope, after.hard, after.period.value) == ("everything", "", False, "day")
    assert after.limit_gpu_ms == 1_199_999


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--hard",),
            "the budget does not exist yet. Add --user, --team, --pool, --policy, --tag or",
        ),
        (("--everything",), "the budget does not exist yet. Add --money or --gpu-hours to set the budget's limit"),
        (("--everything", "--team", "a", "--money", "5"), "specify only one of --user"),
        (("--everything", "--gpu-hours", "5", "--money", "5"), "specify only one of --money"),
        (("--everything", "--money", "1e999999"), "1e999999 is not an amount from 0 to 1,000,000,000,000"),
        (("--everything", "--money", "1e999990"), "is not an amount"),
        (("--everything", "--money", "1e99999999999999999999"), "is not a number"),
        (("--everything", "--money", "0.0000001"), "more than six digits"),
        (("--everything", "--money", "-3"), "-3 is not an amount"),
        (("--everything", "--money", "nan"), "nan is not an amount"),
        (("--everything", "--gpu-hours", "0.0000001"), "more than six digits"),
        (("--everything", "--gpu-hours", "99999999999999"), "99999999999999 is not an amount"),
    ],
)
def test_a_budget_that_does_not_read_like_one_is_refused(said: Said, arguments: tuple[str, ...], says: str) -> None:
    done = said("set", "new", *arguments)
    assert done.exit_code == 2 and says in " ".join(done.output.replace("│", " ").split())
