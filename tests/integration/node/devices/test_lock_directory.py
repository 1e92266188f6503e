"""Where locks live, and what happens when a directory or a file there is hostile or broken."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.second_process import other


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_machine_wide_directory_closed_to_this_user_says_how_to_open_it() -> None:
    parent = Path(tempfile.mkdtemp())
    try:
        parent.chmod(0o755)
        (parent / "locks").mkdir(mode=0o755)
        script = (
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            + """
from serverless_gpu.errors import StorageError
from serverless_gpu.model.hardware import DeviceKind
from serverless_gpu.node.devices.locks import lock_directory
try:
    lock_directory(DeviceKind.GPU, directory, machine=(directory / "locks",))
except StorageError as error:
    say(error.hint)
try:
    locks.try_lock(["GPU-0"], 1, me)
except StorageError as error:
    say(error.message)
"""
        )
        with other(script, parent) as stranger:
            assert stranger.hear() == golden("node.lock_files.open-everybody-sudo", parent=parent)
            assert stranger.hear() == golden("node.lock_files.lock-directory-cannot-used", parent=parent)
    finally:
        shutil.rmtree(parent)
