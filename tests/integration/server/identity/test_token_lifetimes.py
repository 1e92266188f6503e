"""Every token ends; those of nodes are renewed by their use, and those in the server's files before they end."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy as sa

from serverless_gpu.errors import NotAuthenticated
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db import tables
from serverless_gpu.server.db.database import Database, Transactions
from serverless_gpu.server.identity.bootstrap import NODE, FileTokens, first_tokens, join_token
from serverless_gpu.server.records import principals
from serverless_gpu.server.records.principals import RENEWED_BELOW_S, TOKEN_EXPIRY_S, NewToken
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalRequest, TokenRequest
from serverless_gpu.wire.nodes import INVITED_S
from tests.support.server.made import made_services
from tests.support.server.stored import T0

pytestmark = pytest.mark.any_database

DAY_NS = 86_400 * 10**9
LIFE_NS = int(TOKEN_EXPIRY_S * 1e9)
ADMIN = Caller(name="root", role="admin")


def end_of(database: Transactions, secret: str) -> int | None:
    return database.read(lambda connection: principals.token(connection, principals.token_id(secret))).expires_ns


def is_good(database: Transactions, secret: str, now_ns: int) -> bool:
    try:
        database.read(lambda connection: principals.authenticate(connection, secret, now_ns=now_ns))
    except NotAuthenticated:
        return False
    return True


def use(database: Transactions, secret: str, now_ns: int) -> None:
    database.write(lambda connection: principals.note_use(connection, [principals.token_id(secret)], now_ns=now_ns))


def test_22A12_the_first_tokens_end_after_90_days(database: Database, tmp_path: Path) -> None:
    first = first_tokens(database, tmp_path, login="root", now_ns=T0)
    joining = join_token(database, tmp_path, now_ns=T0)
    invited_ns = int(INVITED_S * 1e9)
    for secret, life_ns in ((first.token, LIFE_NS), (first.node_token, LIFE_NS), (joining, invited_ns)):
        assert end_of(database, secret) == T0 + life_ns
        assert is_good(database, secret, T0 + life_ns - 1) and not is_good(database, secret, T0 + life_ns)


def test_22A12_a_node_that_uses_its_token_keeps_it_and_others_end(database: Database, tmp_path: Path) -> None:
    first = first_tokens(database, tmp_path, login="root", now_ns=T0)
    joining = join_token(database, tmp_path, now_ns=T0)
    for day in range(0, 400, 20):
        for secret in (first.node_token, first.token, joining):
            use(database, secret, T0 + day * DAY_NS)
    assert is_good(database, first.node_token, T0 + 440 * DAY_NS)
    assert not is_good(database, first.node_token, T0 + 480 * DAY_NS)  # nobody used it for 90 days
    assert end_of(database, first.token) == T0 + LIFE_NS
    assert end_of(database, joining) == T0 + int(INVITED_S * 1e9)
    use(database, first.node_token, T0 + 600 * DAY_NS)
    assert not is_good(database, first.node_token, T0 + 600 * DAY_NS)  # what has ended stays ended


def test_22A12_a_token_whose_end_was_said_is_not_renewed(services: Services) -> None:
    database, now_ns = services.database, services.clock.wall_ns()
    database.write(lambda c: principals.create_principal(c, PrincipalRequest(name="root", role="admin"), now_ns=now_ns))
    service = PrincipalRequest(name=NODE, kind="service", role="agent")
    renewed = services.principals.make(ADMIN, service)
    said = TokenRequest(principal=NODE, expires_s=3600.0)
    short = services.principals.make_token(ADMIN, said, reach="all")
    assert short.token.expires_ns == now_ns + 3600 * 10**9
    later_ns = now_ns + LIFE_NS - int(RENEWED_BELOW_S * 1e9)
    for made, at_ns in ((short, now_ns + 1), (renewed, later_ns)):
        use(database, made.secret, at_ns)
    ends = [end_of(database, made.secret) for made in (short, renewed)]
    assert ends == [short.token.expires_ns, later_ns + LIFE_NS]


def test_22A12_tokens_that_an_older_version_made_get_an_end(database: Database, tmp_path: Path) -> None:
    first = first_tokens(database, tmp_path, login="root", now_ns=T0)
    revoked = principals.new_secret()

    def as_before(connection: sa.Connection) -> None:
        principals.create_token(connection, NewToken(principal="root"), secret=revoked, now_ns=T0)
        principals.revoke_token(connection, principals.token_id(revoked), now_ns=T0)
        connection.execute(sa.update(tables.tokens).values(expires_ns=None, renews=None))

    database.write(as_before)
    later_ns = T0 + 200 * DAY_NS
    assert first_tokens(database, tmp_path, login="root", now_ns=later_ns) == first
    assert end_of(database, first.token) == end_of(database, first.node_token) == later_ns + LIFE_NS
    assert end_of(database, revoked) is None
    used_ns = later_ns + 45 * DAY_NS
    for secret in (first.token, first.node_token):
        use(database, secret, used_ns)
    assert (end_of(database, first.token), end_of(database, first.node_token)) == (
        later_ns + LIFE_NS,
        used_ns + LIFE_NS,
    )


def test_22A12_the_administrators_file_has_another_token_before_the_one_in_it_ends(
    database: Database, tmp_path: Path
) -> None:
    clock = FakeClock()
    services = made_services(database, tmp_path, clock=clock)
    said: list[str] = []
    path = services.settings.directory / "token"
    tokens = services.make(FileTokens, login="root", renewed=lambda: said.append(path.read_text().strip()))
    before = path.read_text().strip()
    assert tokens.tick(0) > 0 and said == []
    clock.advance(61 * 86_400)
    tokens.tick(0)
    (after,) = said
    assert after != before
    now_ns = clock.wall_ns()
    assert is_good(database, before, now_ns) and is_good(database, after, now_ns)  # a client waits with the old one
    assert not is_good(database, before, now_ns + 30 * DAY_NS) and is_good(database, after, now_ns + 30 * DAY_NS)
    tokens.tick(0)
    assert len(said) == 1


@pytest.mark.parametrize("days", [100, 1_000])
def test_22A12_a_server_that_was_off_until_its_tokens_ended_starts_with_new_ones(
    database: Database, tmp_path: Path, days: int
) -> None:
    first = first_tokens(database, tmp_path, login="root", now_ns=T0)
    now_ns = T0 + days * DAY_NS
    again = first_tokens(database, tmp_path, login="root", now_ns=now_ns)
    assert again.principal == first.principal
    for secret in (again.token, again.node_token):
        assert is_good(database, secret, now_ns)
    assert not is_good(database, first.token, now_ns)
