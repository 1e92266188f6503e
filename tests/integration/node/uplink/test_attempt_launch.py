"""From an order to a launch: which devices of the node an attempt may get."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.ambient import new_run_id
from serverless_gpu.environment.service_messages import StoreLocation
from serverless_gpu.errors import HardwareError, InvalidValue
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.uplink import attempt_launch
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.agents import Start

GREETING = protocol.Greeting(protocol=protocol.PROTOCOL, version="1", pid=1, devices=parse_fake("H100:4"))
ORDER = Start(
    seq=1,
    run_id=new_run_id(),
    fence=1,
    token="t",
    spec=RunSpec(),
    gpu_type="H100",
    world_size=3,
    context=msgspec.Raw(
        msgspec.json.encode(
            protocol.Context(python=sys.executable, flags=(), environ={}, cwd="/", umask=0, argv=(), sys_path=())
        )
    ),
)


def candidates_of(order: Start, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("SERVERLESS_GPU_FAKE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch = attempt_launch.make_launch(
        order, Path("d"), GREETING, clock=FakeClock(), waited_ns=0, store=StoreLocation("")
    )
    return [device.uuid for device in launch.candidates]


def test_a_device_that_is_left_out_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    uuids = [device.uuid for device in GREETING.devices]
    assert candidates_of(ORDER, monkeypatch) == uuids
    order = msgspec.structs.replace(ORDER, without=(uuids[1],))
    assert candidates_of(order, monkeypatch) == [uuids[0], uuids[2], uuids[3]]
    with pytest.raises(HardwareError):
        candidates_of(msgspec.structs.replace(ORDER, without=tuple(uuids[:2])), monkeypatch)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"crew": 2}, "node 2 of [0, 1] with 3 of 3 devices is not a valid gang"),
        ({"world_size": 4}, "node 0 of [0, 1] with 3 of 4 devices is not a valid gang"),
        ({"crews": laid_out([("n0", 2), ("n1", 1)])[::-1]}, "node 1 of the gang must not begin with rank 2"),
        ({"nonce": ""}, "but no nonce for it"),
    ],
)
def test_a_gang_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, object], told: str
) -> None:
    order = msgspec.structs.replace(ORDER, crews=laid_out([("n0", 2), ("n1", 1)]), nonce="secret")
    with pytest.raises(InvalidValue, match=re.escape(told)):
        attempt_launch.take_order(Home(tmp_path), msgspec.structs.replace(order, **changes), tmp_path / "uplink.json")
    assert list(tmp_path.iterdir()) == []


def test_a_crew_gets_its_own_devices_and_not_the_gangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    crews = laid_out([("n0", 2), ("n1", 1)])
    order = msgspec.structs.replace(ORDER, crews=crews, crew=1, nonce="secret")
    launch = attempt_launch.make_launch(
        order, Path("d"), GREETING, clock=FakeClock(), waited_ns=0, store=StoreLocation("")
    )
    assert (launch.world_size, launch.crews, launch.crew, launch.nonce) == (1, crews, 1, "secret")
    assert launch.numbers == range(2, 3)
    taken = attempt_launch.take_order(Home(tmp_path), order, tmp_path / "uplink.json")
    assert taken is not None and taken[1].world_size == 1
