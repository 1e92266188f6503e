"""Teams that a run counts for: in budgets, in alarms and in the fair share alike.

    team="search"             search
    no team, member of some   all of them in budgets; the first by name in the fair share, where one has to pay
    no team, member of none   no team; in the fair share, the owner alone

A run names one team or none, so a member could otherwise leave the team out to escape its budget and its share. Which
teams an owner is in is written down when the run is submitted. Values only: no database.
"""

from __future__ import annotations

from collections.abc import Sequence


def teams_charged(team: str, member_of: Sequence[str]) -> tuple[str, ...]:
    """Return the teams whose budgets count a run, by name."""
    return (team,) if team else tuple(sorted(set(member_of) - {""}))


def share_team(team: str, member_of: Sequence[str]) -> str:
    """Return the team whose fair share a run uses, or ""; the arguments are those of `teams_charged`.

    A member may name any of the teams, so the first by name gives no member more than they can ask for.
    """
    return next(iter(teams_charged(team, member_of)), "")
