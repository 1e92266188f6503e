"""What a kernel, or the Python that asks it, lacks is said before anything is started."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from serverless_gpu.engines.base import NodeLost
from serverless_gpu.engines.local import LocalEngine
from serverless_gpu.errors import HardwareError
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.requirements import pidfd_refusal, require_pidfd
from serverless_gpu.node.uplink import control
from serverless_gpu.node.uplink.server import UplinkProfile
from tests.support.golden import golden


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Have `pidfd_open` fail in this process."""

    def refused(_: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refused)


def test_23C4_a_kernel_with_pidfd_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pidfd_refusal() == ("", "")
    refuse(monkeypatch, errno.EMFILE)  # a limit of this process, which says nothing about the kernel
    require_pidfd()


def test_23C4_a_python_that_was_built_for_older_kernels_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(HardwareError, match=re.escape(golden("node.kernel.build-python-os"))) as refused:
        require_pidfd()
    assert golden("node.kernel.built-newer-system") in refused.value.hint


def test_23C4_a_node_of_a_server_says_that_it_can_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs used to begin there four times, and to fail four times."""
    refuse(monkeypatch, errno.ENOSYS)
    monkeypatch.setattr(control, "clean_process", lambda *_, **__: pytest.fail("an uplink was started"))
    home = tmp_path / "home"
    home.mkdir()
    profile = UplinkProfile(url="http://127.0.0.1:1", token="t", name="here")
    engine = LocalEngine(Home(home), tmp_path / "engine", profile=profile, environ={})
    (event,) = engine.events()
    assert isinstance(event, NodeLost) and event.sentence.startswith("this machine cannot run ranks: Linux ")
    assert engine.nodes() == []
