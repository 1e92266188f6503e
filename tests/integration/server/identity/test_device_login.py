"""The approval of a terminal's login: codes, polls, decisions, limits, and the token that comes of it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from serverless_gpu.errors import NotAllowed, NotFound, TooManyRequests
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.identity import device_service
from serverless_gpu.server.identity.device_service import CODE_S, INTERVAL_S, PER_ADDRESS, PER_CALLER, format_user_code
from serverless_gpu.server.records import principals
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.access import PrincipalChange, PrincipalRequest
from serverless_gpu.wire.sign_in import DeviceAnswer, DeviceCode, DeviceCodeRequest
from tests.support.server.made import made_services

pytestmark = pytest.mark.any_database
ROOT, ALICE = Caller(name="root", role="admin"), Caller(name="alice", role="member", token_id="session")
HERE = "10.0.0.1"


@pytest.fixture
def services(database: Database, tmp_path: Path, clock: FakeClock) -> Services:
    """Return services with the users root and alice."""
    made = made_services(database, tmp_path, clock=clock)
    for name, role in (("root", "admin"), ("alice", "member")):
        request = PrincipalRequest(name=name, role=role)  # type: ignore[arg-type]  # from a tuple of texts
        database.write(functools.partial(principals.create_principal, request=request, now_ns=1))
    return made


@pytest.fixture
def code(services: Services) -> DeviceCode:
    return services.devices.start(DeviceCodeRequest(host="laptop"), address=HERE)


def poll(services: Services, clock: FakeClock, code: DeviceCode, wait_s: float = INTERVAL_S) -> DeviceAnswer:
    clock.advance(wait_s)
    return services.devices.poll(code.device_code, address=HERE)


def test_an_approved_terminal_gets_a_token_of_the_approver_with_its_name(
    services: Services, clock: FakeClock, code: DeviceCode
) -> None:
    assert poll(services, clock, code).state == "pending"
    shown = services.devices.find(ALICE, code.user_code)
    assert (shown.host, shown.address, shown.state) == ("laptop", HERE, "pending")
    services.devices.decide(ALICE, code.user_code.lower().replace("-", " "), approve=True)
    answer = poll(services, clock, code)
    assert answer.made is not None
    token = answer.made.token
    assert (token.principal, token.made_by, token.scopes) == ("alice", "alice", ())
    assert "laptop" in token.label
    assert services.authenticator.authenticate(answer.made.secret).name == "alice"


def test_a_lost_answer_comes_again_and_makes_no_second_token(
    services: Services, clock: FakeClock, code: DeviceCode, database: Database
) -> None:
    services.devices.decide(ALICE, code.user_code, approve=True)
    first, second = poll(services, clock, code), poll(services, clock, code, 0)
    assert first.made == second.made
    assert len(database.read(lambda connection: principals.tokens_of(connection, "alice"))) == 1
    assert poll(services, clock, code, CODE_S).state == "expired"


def test_a_refused_terminal_gets_nothing(services: Services, clock: FakeClock, code: DeviceCode) -> None:
    services.devices.decide(ALICE, code.user_code, approve=False)
    assert poll(services, clock, code).state == "refused"
    with pytest.raises(NotFound):
        services.devices.decide(ROOT, code.user_code, approve=True)
    assert poll(services, clock, code).made is None


def test_codes_expire(services: Services, clock: FakeClock, code: DeviceCode) -> None:
    assert poll(services, clock, code, CODE_S + 1).state == "expired"
    with pytest.raises(NotFound):
        services.devices.decide(ALICE, code.user_code, approve=True)


def test_a_terminal_that_polls_too_often_waits_longer(services: Services, clock: FakeClock, code: DeviceCode) -> None:
    assert poll(services, clock, code).state == "pending"
    answer = poll(services, clock, code, 0.1)
    assert answer.state == "slow_down"
    assert answer.interval_s > INTERVAL_S
    assert poll(services, clock, code, answer.interval_s).state == "pending"


def test_after_a_restart_the_code_is_unknown_and_not_an_error(
    services: Services, database: Database, tmp_path: Path, clock: FakeClock, code: DeviceCode
) -> None:
    again = made_services(database, tmp_path, clock=clock)
    assert poll(again, clock, code).state == "expired"


@pytest.mark.parametrize(
    "who",
    [Caller(name="alice", role="member", scopes=("tokens",)), Caller(name="bot", role="member", kind="service")],
)
def test_neither_a_scoped_token_nor_a_service_approves(services: Services, code: DeviceCode, who: Caller) -> None:
    with pytest.raises(NotAllowed):
        services.devices.decide(who, code.user_code, approve=True)


def test_an_approver_who_was_disabled_meanwhile_gives_nothing(
    services: Services, clock: FakeClock, code: DeviceCode
) -> None:
    services.devices.decide(ALICE, code.user_code, approve=True)
    services.principals.change(ROOT, "alice", PrincipalChange(disabled=True))
    answer = poll(services, clock, code)
    assert (answer.state, answer.made) == ("refused", None)


def test_user_codes_cannot_be_guessed(services: Services, code: DeviceCode) -> None:
    for _ in range(PER_CALLER.attempts):
        with pytest.raises(NotFound):
            services.devices.find(ALICE, "BBBB-BBBB")
    with pytest.raises(TooManyRequests):
        services.devices.find(ALICE, code.user_code)
    assert services.devices.find(ROOT, code.user_code).host == "laptop"


def test_an_address_gets_a_limited_number_of_codes(services: Services, code: DeviceCode) -> None:
    for _ in range(PER_ADDRESS.attempts - 1):
        services.devices.start(DeviceCodeRequest(), address=HERE)
    with pytest.raises(TooManyRequests):
        services.devices.start(DeviceCodeRequest(), address=HERE)
    services.devices.start(DeviceCodeRequest(), address="10.0.0.2")


def test_the_number_of_waiting_terminals_has_a_limit(
    services: Services, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_service, "REQUESTS_MAX", 3)
    for number in range(3):
        services.devices.start(DeviceCodeRequest(), address=f"10.0.0.{number}")
    with pytest.raises(TooManyRequests):
        services.devices.start(DeviceCodeRequest(), address="10.0.0.9")
    clock.advance(CODE_S + 1)
    services.devices.start(DeviceCodeRequest(), address="10.0.0.9")


def test_without_pages_nobody_could_approve(database: Database, tmp_path: Path, clock: FakeClock) -> None:
    devices = made_services(database, tmp_path, clock=clock, ui=False).devices
    with pytest.raises(NotFound):
        devices.start(DeviceCodeRequest(), address=HERE)


def test_a_code_is_read_as_people_type_it() -> None:
    assert {format_user_code(text) for text in ("BCDF-GHJK", "bcdfghjk", " bcdf ghjk ", "b.c.d.f/g-h-j-k")} == {
        "BCDF-GHJK"
    }
    assert format_user_code("") == "-"
