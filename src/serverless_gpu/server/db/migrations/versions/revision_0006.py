"""Adds the owner's teams to runs without a team, and a time zone to each team."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = depends_on = None

_OVER = ("SUCCEEDED", "FAILED", "CANCELLED", "TIMED_OUT", "BUDGET_STOPPED", "LOST")


def upgrade() -> None:
    """Add the columns, and store the owner's teams for unfinished runs."""
    op.add_column("teams", sa.Column("time_zone", sa.String(length=64)))
    op.add_column("runs", sa.Column("member_of_json", sa.Text()))
    op.add_column("accounts", sa.Column("member_of_json", sa.Text()))
    runs = sa.table("runs", *(sa.column(name) for name in ("id", "owner", "team", "state", "member_of_json")))
    members = sa.table("members", sa.column("team"), sa.column("principal"))
    connection = op.get_bind()
    teams: dict[str, list[str]] = {}
    for team, principal in connection.execute(sa.select(members.c.team, members.c.principal).order_by(members.c.team)):
        teams.setdefault(principal, []).append(team)
    going_on = sa.and_(runs.c.team == "", runs.c.state.not_in(_OVER))
    for owner, there in teams.items():
        own = sa.and_(runs.c.owner == owner, going_on)
        connection.execute(runs.update().where(own).values(member_of_json=json.dumps(there)))
