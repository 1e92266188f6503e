"""Helpers of the tests of gang that other tests use as well."""

from __future__ import annotations

from pathlib import Path

import msgspec

from serverless_gpu.model.hardware import Device, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Event
from serverless_gpu.model.spec import RayCluster, RunSpec
from serverless_gpu.node.attempt.usage_account import AttemptAccount
from serverless_gpu.node.base.protocol import Context, Launch
from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.inside.channel import Channel, pair
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from serverless_gpu.node.supervisor.gang import HostStem, LocalGang
from serverless_gpu.testing import FakeClock


class Line:
    """A gang of one rank, and the other end of its channel.

    Attributes:
        said: the sentences that whoever watches was told.
    """

    def __init__(self, directory: Path, *, stem: HostStem | None = None, uid: int = 0) -> None:
        device = Device(uuid="D-0", index=0, type="H100", kind=DeviceKind.FAKE, memory_bytes=0)
        launch = Launch(
            run_id="01run",
            fence=1,
            directory=str(directory),
            spec=RunSpec(ray=RayCluster()),
            candidates=(device,),
            world_size=2,
            context=Context(python="python3", flags=(), environ={}, cwd="/", umask=0o022, argv=(), sys_path=()),
            called_ns=0,
        )
        ours, self.rank = pair()
        self.account = AttemptAccount(launch, FakeClock())
        files = msgspec.structs.replace(attempt_files(launch), uid=uid)
        self.gang = LocalGang(launch, Channel(ours.sock), self.account, stem=stem, files=files)
        self.said: list[str] = []
        self.gang.on_said = self.said.append

    def hear(self, **event: object) -> list[Event]:
        """Have the rank say something, and return what it means."""
        self.rank.send(inside.encode({"rank": 0, "at": 1, **event}))
        heard = self.gang.hear()
        assert heard is not None
        return heard
