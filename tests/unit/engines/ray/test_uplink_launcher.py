"""The file by which a machine's agent is started: private, whole, and refused by name when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.engines.ray.uplink_launcher import NodeFile, read_node_file, write_node_file
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.base.private_files import readers
from tests.support.golden import golden

FILE = NodeFile(python="/opt/env/bin/python", paths=("/opt/src",), home="/home/ada/.serverless_gpu", profile="/p.json")


def test_it_says_what_was_written_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "ray" / "node.json"
    write_node_file(path, FILE)
    assert read_node_file(path) == FILE
    assert readers(path) == ""
    path.chmod(0o640)
    assert readers(path) == golden("engines.ray_node_file.mode-0640-so")


@pytest.mark.parametrize("text", ["", "{}", '{"python": 1}'])
def test_what_is_none_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "node.json"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=golden("engines.ray_node_file.does-say-how", path=path)):
        read_node_file(path)
