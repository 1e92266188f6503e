"""Messages about principals whose runs share one operating-system user on a node."""

from __future__ import annotations

from collections.abc import Sequence

from serverless_gpu.model.scheduling.wait_messages import some

REMEDY = "sgpu pool set {pool} --isolation none"
REVOKE = "sgpu pool set {pool} --isolation unset"


def isolation_sentence(pools: Sequence[str]) -> str:
    """Return why a run of a second principal waits, and the remedy."""
    verb = "runs" if len(pools) == 1 else "run"
    return (
        f"{_named(pools)} {verb} the code of one principal only, because all runs there share one operating-system "
        f"user; an administrator can accept that: `{REMEDY.format(pool=pools[0])}`"
    )


def sharing_warnings(*, principals: Sequence[str], closed: Sequence[str], shared: Sequence[str]) -> list[str]:
    """Return what operators read about principals that share, or would share, one operating-system user."""
    if not principals:
        return []
    who, found = ", ".join(some(principals)), []
    if shared:
        found.append(
            f"all runs in {_named(shared)} share one operating-system user: the code of {who} can read secrets and "
            "results of other users, and on this server's machine the server's key and tokens; "
            f"`{REVOKE.format(pool=shared[0])}` ends that for new runs"
        )
    if closed or not shared:
        waiting = closed or ["default"]
        found.append(
            f"runs of {who} wait in {_named(waiting)} with the reason isolation: all runs there share one "
            f"operating-system user; to accept that: `{REMEDY.format(pool=waiting[0])}`"
        )
    return found


def _named(pools: Sequence[str]) -> str:
    return f"pool{'s' if len(pools) > 1 else ''} {', '.join(some(pools))}"
