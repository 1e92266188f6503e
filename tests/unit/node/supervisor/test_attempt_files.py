"""What a supervisor shows to the ranks of an attempt, at each isolation level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.isolation import Level
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.secrets import DeliveredSecrets
from serverless_gpu.node.isolation.grafts import Graft
from serverless_gpu.node.spawner.verbs import Spawner
from serverless_gpu.node.supervisor import attempt_files as module
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from tests.support.node.account import launch

UID = 61_001
GPUS = [Device(uuid="GPU-a", index=0, type="H100", kind=DeviceKind.GPU, memory_bytes=0)]


class Recorder:
    """A spawner that records the files and devices of an attempt."""

    def __init__(self) -> None:
        self.grafts: dict[str, Graft] = {}
        self.limited: tuple[str, list[str]] | None = None

    def give(self, uid: int, path: str, *, writable: bool) -> None:
        pass

    def show(self, stem_pidfd: int, shown: Sequence[Graft]) -> int:
        self.grafts = {each.at: each for each in shown}
        return -1

    def limit_devices(self, cgroup: str, nodes: Sequence[str]) -> str:
        self.limited = (cgroup, list(nodes))
        return "a note"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return a spawner, on a node with GPUs and InfiniBand."""
    monkeypatch.setattr(module, "gpu_nodes", lambda uuids: [f"/dev/node-of-{uuid}" for uuid in uuids])
    monkeypatch.setattr(module, "network_nodes", lambda: ["/dev/infiniband/uverbs0"])
    return Recorder()


def show(shown: Recorder, directory: Path, level: Level, gpus: tuple[int, ...] = (1,)) -> str:
    (directory / "secrets").mkdir()
    (directory / "call.pkl").touch()
    crews = laid_out([(f"n{number}", count) for number, count in enumerate(gpus)])
    launched = msgspec.structs.replace(
        launch(directory),
        isolation=level,
        crews=crews if len(crews) > 1 else (),
        secrets=DeliveredSecrets(directory=str(directory / "secrets"), texts=("A@1",)),
    )
    files = attempt_files(launched, uid=UID if level != "none" else 0)
    return files.show(cast(Spawner, shown), -1, GPUS, cgroup=directory).note


def test_27_a_sandbox_has_a_filter_with_the_devices_of_the_attempt(tmp_path: Path, shown: Recorder) -> None:
    assert show(shown, tmp_path, "sandbox") == "a note"
    assert shown.limited == (str(tmp_path), ["/dev/node-of-GPU-a"])


def test_27_only_a_run_on_several_nodes_gets_the_adapters_of_infiniband(tmp_path: Path, shown: Recorder) -> None:
    show(shown, tmp_path, "sandbox", (1, 1))
    assert shown.limited == (str(tmp_path), ["/dev/node-of-GPU-a", "/dev/infiniband/uverbs0"])


@pytest.mark.parametrize("level", ["user", "sandbox"])
def test_27_secrets_are_copied_for_their_principal_and_not_shown(tmp_path: Path, shown: Recorder, level: Level) -> None:
    show(shown, tmp_path, level)
    [secrets] = [each for each in shown.grafts.values() if each.source == str(tmp_path / "secrets")]
    assert (secrets.owner, secrets.at.startswith("/run/sgpu/")) == (UID, True)
    assert {each.owner for each in shown.grafts.values() if each is not secrets} == {None}


@pytest.mark.parametrize("level", ["none", "user"])
def test_without_a_sandbox_devices_have_no_filter(tmp_path: Path, shown: Recorder, level: Level) -> None:
    assert show(shown, tmp_path, level) == "" and shown.limited is None
