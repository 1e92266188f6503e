"""Challenges and tokens of sessions: each challenge is valid once, each token names one node and one key."""

from __future__ import annotations

import pytest

from serverless_gpu.server.core.server_key import Keys, NodeSession
from serverless_gpu.server.nodes.node_sessions import CHALLENGE_S, Challenges
from serverless_gpu.testing import FakeClock

SESSION = NodeSession("t" * 26, "a" * 32, 1_900_000_000)


def test_27_7_a_challenge_is_valid_once_for_its_token() -> None:
    challenges = Challenges(FakeClock())
    said = challenges.issue("t1")
    assert not challenges.use("t2", said)
    assert challenges.use("t1", said)
    assert not challenges.use("t1", said)
    assert challenges.use("t1", challenges.issue("t1"))


def test_27_7_a_challenge_expires_and_is_then_forgotten() -> None:
    clock = FakeClock()
    challenges = Challenges(clock)
    used, late = challenges.issue("t1"), challenges.issue("t1")
    assert challenges.use("t1", used)
    clock.advance(CHALLENGE_S + 1)
    assert not challenges.use("t1", late)
    assert challenges.use("t1", challenges.issue("t1"))
    assert len(challenges._used) == 1  # the old ones take no memory


@pytest.mark.parametrize("said", ["", ".", "1.a.b", "99999999999.AAAA.AAAA", "x.y.z", "é.é.é"])
def test_27_7_a_challenge_that_the_server_did_not_issue_is_refused(said: str) -> None:
    assert not Challenges(FakeClock()).use("t1", said)


def test_27_7_a_challenge_of_an_earlier_server_process_is_refused() -> None:
    clock = FakeClock()
    assert not Challenges(clock).use("t1", Challenges(clock).issue("t1"))


def test_27_7_the_token_of_a_session_says_what_was_signed_and_nothing_else() -> None:
    keys = Keys(b"k" * 32)
    token = keys.session_token(SESSION)
    assert keys.node_session(token) == SESSION
    assert Keys(b"l" * 32).node_session(token) is None
    for old, new in (("t", "u"), ("a" * 32, "b" * 32), ("_19", "_29")):
        assert keys.node_session(token.replace(old, new, 1)) is None
    for said in ("", "sgpn_", token[:-1], token + "A", token.replace("sgpn", "sgpa")):
        assert keys.node_session(said) is None
