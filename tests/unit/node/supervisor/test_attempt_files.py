"""What a supervisor shows to the ranks of an attempt, at each isolation level."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.isolation import Level
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.secrets import DeliveredSecrets
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.supervisor import attempt_files as module
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from tests.support.node.account import launch

UID = 61_001
GPUS = [Device(uuid="GPU-a", index=0, type="H100", kind=DeviceKind.GPU, memory_bytes=0)]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the supervisor asks of the node's isolation, by verb."""
    asked: dict[str, Any] = {}

    def graft(pidfd: int, grafts: Sequence[Graft]) -> None:
        asked["grafts"] = {each.at: each for each in grafts}

    def limit_devices(cgroup: Path | None, nodes: Sequence[str]) -> str:
        asked["limited"] = (cgroup, nodes)
        return "a note"

    monkeypatch.setattr(os, "chown", lambda *_: None)
    monkeypatch.setattr(module, "graft", graft)
    monkeypatch.setattr(module, "limit_devices", limit_devices)
    monkeypatch.setattr(module, "gpu_nodes", lambda uuids: [f"/dev/node-of-{uuid}" for uuid in uuids])
    monkeypatch.setattr(module, "network_nodes", lambda: ["/dev/infiniband/uverbs0"])
    return asked


def show(directory: Path, level: Level, gpus: tuple[int, ...] = (1,)) -> str:
    (directory / "secrets").mkdir()
    (directory / "call.pkl").touch()
    crews = laid_out([(f"n{number}", count) for number, count in enumerate(gpus)])
    launched = msgspec.structs.replace(
        launch(directory),
        isolation=level,
        crews=crews if len(crews) > 1 else (),
        secrets=DeliveredSecrets(directory=str(directory / "secrets"), texts=("A@1",)),
    )
    return attempt_files(launched, uid=UID if level != "none" else 0).show(-1, GPUS, cgroup=directory)


def test_27_a_sandbox_has_a_filter_with_the_devices_of_the_attempt(tmp_path: Path, shown: dict[str, Any]) -> None:
    assert show(tmp_path, "sandbox") == "a note"
    assert shown["limited"] == (tmp_path, ["/dev/node-of-GPU-a"])


def test_27_only_a_run_on_several_nodes_gets_the_adapters_of_infiniband(tmp_path: Path, shown: dict[str, Any]) -> None:
    show(tmp_path, "sandbox", (1, 1))
    assert shown["limited"] == (tmp_path, ["/dev/node-of-GPU-a", "/dev/infiniband/uverbs0"])


@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_27_secrets_are_copied_for_their_principal_and_not_shown(
    tmp_path: Path, shown: dict[str, Any], level: Level
) -> None:
    show(tmp_path, level)
    [secrets] = [each for each in shown["grafts"].values() if each.source == str(tmp_path / "secrets")]
    assert (secrets.owner, secrets.at.startswith("/run/sgpu/")) == (UID, True)
    assert {each.owner for each in shown["grafts"].values() if each is not secrets} == {None}


@pytest.mark.parametrize("level", ["none", "user"])
def test_without_a_sandbox_devices_have_no_filter(tmp_path: Path, shown: dict[str, Any], level: Level) -> None:
    assert show(tmp_path, level) == "" and "limited" not in shown
