"""The file of a node's private keys: made once, private, and replaced only after the server has the new keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink.node_key_file import NAME, NodeKeyFile, PrivateKeys
from serverless_gpu.wire import node_crypto


@pytest.fixture
def keys(tmp_path: Path) -> NodeKeyFile:
    return NodeKeyFile(Home(tmp_path))


def test_27_7_a_home_has_one_private_file_of_keys(keys: NodeKeyFile, tmp_path: Path) -> None:
    path = tmp_path / NAME
    assert path.stat().st_mode & 0o777 == 0o600
    assert NodeKeyFile(Home(tmp_path)).current.public == keys.current.public
    assert keys.current.public != PrivateKeys.generate().public
    assert "signing" not in repr(keys.current.public.fingerprint)


def test_27_7_a_file_that_others_can_read_is_refused(keys: NodeKeyFile, tmp_path: Path) -> None:
    (tmp_path / NAME).chmod(0o640)
    with pytest.raises(InvalidValue, match="not private") as found:
        NodeKeyFile(Home(tmp_path))
    assert "sgpu node invite" in found.value.hint


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"signing": "AAAA", "sealing": "AAAA"}'])
def test_27_7_a_damaged_file_is_named(keys: NodeKeyFile, tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    with pytest.raises(InvalidValue, match="of a node"):
        NodeKeyFile(Home(tmp_path))


def test_27_7_a_signature_is_of_one_key_and_one_text(keys: NodeKeyFile) -> None:
    signature, public = keys.current.sign(b"text"), keys.current.public
    assert node_crypto.verifies(public, b"text", signature)
    assert not node_crypto.verifies(public, b"Text", signature)
    assert not node_crypto.verifies(PrivateKeys.generate().public, b"text", signature)
    assert not node_crypto.verifies(public, b"text", bytes(64))


def test_27_7_only_the_node_opens_what_is_sealed_to_it_and_only_for_its_order(keys: NodeKeyFile) -> None:
    sealed = node_crypto.sealed(keys.current.public, b"hunter2", about=b"order")
    assert b"hunter2" not in sealed and len(sealed) == len(b"hunter2") + 48
    assert sealed != node_crypto.sealed(keys.current.public, b"hunter2", about=b"order")
    assert keys.open(sealed, about=b"order") == b"hunter2"
    assert keys.open(sealed, about=b"another order") is None
    assert keys.open(sealed[:-1], about=b"order") is None
    assert keys.open(b"", about=b"order") is None
    assert PrivateKeys.generate().open(sealed, about=b"order") is None


def test_27_7_a_key_with_which_nothing_can_be_sealed_is_refused(keys: NodeKeyFile) -> None:
    node_crypto.check_sealing(keys.current.public)
    with pytest.raises(InvalidValue):
        node_crypto.check_sealing(type(keys.current.public)(signing=bytes(32), sealing=bytes(32)))


def test_27_7_new_keys_are_on_disk_before_the_server_has_them(keys: NodeKeyFile, tmp_path: Path) -> None:
    old = keys.current
    assert keys.next() is None
    new = keys.make_next()
    assert keys.make_next().public == new.public and keys.current is old
    again = NodeKeyFile(Home(tmp_path))  # killed before the answer
    found = again.next()
    assert found is not None and found.public == new.public and again.current.public == old.public
    again.promote(found)
    assert NodeKeyFile(Home(tmp_path)).current.public == new.public
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_27_7_orders_around_a_rotation_can_be_opened(keys: NodeKeyFile) -> None:
    before = node_crypto.sealed(keys.current.public, b"before", about=b"")
    new = keys.make_next()
    early = node_crypto.sealed(new.public, b"early", about=b"")  # the order overtakes the answer to the rotation
    assert keys.open(early, about=b"") == b"early"
    keys.promote(new)
    assert keys.open(before, about=b"") == b"before" and keys.open(early, about=b"") == b"early"
