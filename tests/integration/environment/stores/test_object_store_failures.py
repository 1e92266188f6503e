"""F43: a server that answers badly, slowly or not at all; what is tried again, for how long, and what is said."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest

from serverless_gpu.environment.stores.base import Store
from serverless_gpu.environment.stores.store_urls import open_store
from serverless_gpu.errors import StorageError, StoreUnavailable
from serverless_gpu.testing.stores import pack_key
from tests.support.environment.servers import SECRET, Reply, Scripted, variables
from tests.support.golden import golden

DATA = b"0123456789" * 500
KEY = pack_key(DATA)
FINE = Reply(200, DATA)
OK = Reply(200)
BROKEN = Reply(503, b"<Error><Code>SlowDown</Code><Message>please</Message></Error>")


def reached(server: Scripted, bound_s: float = 20.0) -> Store:
    return open_store("s3://bucket/prefix", variables(server.url), bound_s=bound_s)


@pytest.mark.parametrize(
    "bad",
    [
        BROKEN,
        Reply(500),
        Reply(429),
        Reply(408),
        Reply(200, DATA, cut=2500),
        Reply(200, DATA, cut=0),
        Reply(403, b"<Error><Code>SignatureDoesNotMatch</Code></Error>"),
    ],
    ids=["503", "500", "429", "408", "broken off", "no body", "refused once"],
)
def test_F43_a_bad_answer_is_asked_for_again(bad: Reply) -> None:
    with Scripted(bad, FINE) as server:
        assert reached(server).get(KEY) == DATA
        assert server.asked == [f"GET /bucket/prefix/{KEY}"] * 2


def test_F43_several_bad_answers_in_a_row() -> None:
    with Scripted(BROKEN, Reply(500), Reply(200, DATA, cut=10), BROKEN, FINE) as server:
        assert reached(server).get(KEY) == DATA
        assert len(server.asked) == 5
    with Scripted(BROKEN, Reply(500), OK) as server:
        reached(server).put({KEY: DATA})
        assert len(server.asked) == 3


def test_F43_not_there_after_it_was_put() -> None:
    with Scripted(OK, Reply(404), Reply(404), FINE) as server:
        store = reached(server)
        store.put({KEY: DATA})
        assert store.get(KEY) == DATA


def test_F43_not_there_is_believed_in_the_end() -> None:
    with Scripted(Reply(404)) as server:
        began = time.monotonic()
        with pytest.raises(KeyError):
            reached(server).get(KEY)
        assert time.monotonic() - began < 20
        assert len(server.asked) > 1
    with Scripted(Reply(404)) as server:
        with pytest.raises(KeyError):
            reached(server).get("gc/condemned")
        assert reached(server).present([KEY]) == frozenset()
        assert len(server.asked) == 2


CALLS: list[Callable[[Store], object]] = [
    lambda store: store.get(KEY),
    lambda store: store.get(KEY, 1, 2),
    lambda store: store.put({KEY: DATA}),
    lambda store: store.present([KEY]),
    lambda store: list(store.list("packs")),
    lambda store: store.delete([KEY]),
]
NAMES = ["get", "range", "put", "present", "list", "delete"]


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_F43_a_server_that_stays_broken(call: Callable[[Store], object]) -> None:
    with Scripted(BROKEN) as server:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable) as caught:
            call(reached(server, 1.0))
        assert time.monotonic() - began < 10
        assert len(server.asked) >= 2
    message = caught.value.message
    assert message.startswith(f"the store s3://bucket/prefix (at {server.url}) does not ")
    assert (
        golden(
            "environment.bad_servers.503-asked-times",
            value="" if call is CALLS[3] else " SlowDown",
            len=len(server.asked),
        )
        in message
    )
    assert caught.value.hint == golden("environment.bad_servers.look-whether-server")


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_F43_a_server_that_never_answers(call: Callable[[Store], object]) -> None:
    with Scripted(Reply(hold=True)) as server:
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=golden("environment.bad_servers.answer-time-asked")):
            call(reached(server, 1.0))
        assert time.monotonic() - began < 10


def test_F43_many_questions_to_a_server_that_is_down_have_one_bound() -> None:
    with Scripted(OK) as server:
        pass
    keys = [pack_key(b"%d" % number) for number in range(640)]
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="no connection"):
        reached(server, 0.5).present(keys)
    assert time.monotonic() - began < 10


def test_F43_a_slow_answer_is_given_up_and_asked_for_again() -> None:
    with Scripted(Reply(hold=True), FINE) as server:
        assert reached(server, 2.0).get(KEY) == DATA
        assert len(server.asked) == 2


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_F43_a_server_that_is_down(call: Callable[[Store], object]) -> None:
    with Scripted(OK) as server:
        pass
    with pytest.raises(StoreUnavailable, match=golden("environment.bad_servers.connection-asked-times")):
        call(reached(server, 0.5))


@pytest.mark.parametrize("call", CALLS, ids=NAMES)
def test_F43_a_server_that_refuses_is_not_asked_for_minutes(call: Callable[[Store], object]) -> None:
    with Scripted(Reply(403, b"<Error><Code>AccessDenied</Code><Message>x</Message></Error>")) as server:
        with pytest.raises(StoreUnavailable, match=r"refuses to .*: 403"):
            call(reached(server, 300.0))
        assert len(server.asked) == 2


def test_F40_a_server_without_space() -> None:
    for reply in (
        Reply(507, b"<Error><Code>XMinioStorageFull</Code></Error>"),
        Reply(500, b"<Error><Code>InternalError</Code><Message>write: no space left on device</Message></Error>"),
    ):
        with Scripted(reply) as server:
            with pytest.raises(StorageError, match=re.escape(golden("environment.bad_servers.space-left-store"))):
                reached(server).put({KEY: DATA})
            assert len(server.asked) == 1


def test_an_entity_tag_that_is_no_md5_is_found_out_once() -> None:
    other = {"ETag": '"' + "0" * 32 + '"'}
    with Scripted(Reply(headers=other), FINE, Reply(headers=other), Reply(headers=other)) as server:
        store = reached(server)
        for _ in range(3):
            store.put({KEY: DATA})
        assert [asked.split()[0] for asked in server.asked] == ["PUT", "GET", "PUT", "PUT"]


def test_F42_other_bytes_on_the_server_are_sent_again() -> None:
    other = Reply(headers={"ETag": '"' + "0" * 32 + '"'})
    with Scripted(other, Reply(200, DATA[1:]), OK) as server:
        reached(server).put({KEY: DATA})
        assert [asked.split()[0] for asked in server.asked] == ["PUT", "GET", "PUT"]
    replies = [other, Reply(200, DATA[1:])] * 20
    with (
        Scripted(*replies) as server,
        pytest.raises(StoreUnavailable, match=re.escape(golden("environment.bad_servers.arrived-sent"))),
    ):
        reached(server, 1.0).put({KEY: DATA})


def test_secrets_are_in_no_text() -> None:
    echo = f"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>{SECRET} test-key</StringToSign></Error>".encode()
    for reply in (Reply(403, echo), Reply(500, echo), Reply(400, echo), Reply(200, echo, cut=3)):
        with Scripted(reply) as server:
            environ = variables(server.url.replace("http://", f"http://user:{SECRET}@"))
            for call in CALLS[: 4 if reply.status != 200 else 2]:
                with pytest.raises(StoreUnavailable) as caught:
                    call(open_store("s3://bucket/prefix", environ, bound_s=0.4))
                texts = [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
                assert not [text for text in texts if SECRET in text or "test-key" in text]


def test_no_credentials_at_all() -> None:
    with Scripted(Reply(404)) as metadata:
        environ = {"AWS_METADATA_ENDPOINT": metadata.url, "AWS_ENDPOINT_URL": metadata.url}
        with pytest.raises(StoreUnavailable) as caught:
            open_store("s3://bucket/prefix", environ, bound_s=5).get(KEY)
    assert golden("environment.bad_servers.cannot-asked-credentials") in caught.value.message
    assert caught.value.hint == golden("environment.bad_servers.set-aws-access")


def test_google_and_azure_are_asked_where_their_variables_say() -> None:
    with Scripted(FINE) as server:
        open_store("gs://bucket/a", {"GOOGLE_BASE_URL": server.url, "GOOGLE_SKIP_SIGNATURE": "true"}).get(KEY)
        azure = {"AZURE_STORAGE_ACCOUNT_NAME": "me", "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0"}
        open_store("az://container/b", {**azure, "AZURE_STORAGE_ENDPOINT": server.url}).get(KEY)
        assert [asked.replace("%2F", "/") for asked in server.asked] == [
            f"GET /bucket/a/{KEY}",
            f"GET /container/b/{KEY}",
        ]


def test_after_a_fork_it_is_refused_and_does_not_hang() -> None:
    program = """
import os, sys
from serverless_gpu.environment.stores.store_urls import open_store
from tests.support.environment.servers import variables
store = open_store("s3://bucket", variables(sys.argv[1]))
key = "packs/" + "0" * 64
store.present([key])
if os.fork() == 0:
    try:
        store.present([key])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.wait()
"""
    with Scripted(OK) as server:
        command = [sys.executable, "-W", "ignore", "-c", program, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("StoreUnavailable the store s3://bucket cannot be used in a process that was forked")


def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(StoreUnavailable) as caught:
        open_store("s3://bucket/prefix", {})
    assert str(caught.value) == golden("environment.bad_servers.s3-bucket-cannot")


def test_many_are_looked_for_at_once() -> None:
    keys = [pack_key(b"%d" % number) for number in range(64)]
    with Scripted(OK) as server:
        assert reached(server).present(keys) == frozenset(keys)
        assert sorted(server.asked) == sorted(f"HEAD /bucket/prefix/{key}" for key in keys)
        assert not [asked for asked in server.asked if "list" in asked]


@pytest.mark.parametrize(
    "wrong", ["s3:///x", "s3://bucket/../x", "s3://bucket/a//b", "ftp://x/y", "", "s3://bucket/a b"]
)
def test_what_is_not_a_store(wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(golden("environment.bad_servers.store"))):
        open_store(wrong, {})


def test_a_url_with_a_secret_is_refused_and_not_repeated() -> None:
    for url in (f"s3://key:{SECRET}@bucket/prefix", f"az://container?sig={SECRET}", f"s3://bucket/#{SECRET}"):
        with pytest.raises(
            ValueError, match=re.escape(golden("environment.bad_servers.user-password-query"))
        ) as caught:
            open_store(url, {})
        assert SECRET not in str(caught.value)


def test_a_variable_with_an_impossible_value_is_named() -> None:
    refused = partial(open_store, "s3://bucket", variables("http://127.0.0.1:1", AWS_SKIP_SIGNATURE="perhaps"))
    with pytest.raises(
        ValueError, match=re.escape(golden("environment.bad_servers.cannot-reached-variables"))
    ) as caught:
        refused()
    assert "AWS_SKIP_SIGNATURE" in str(caught.value)
    assert "perhaps" not in str(caught.value)
