"""Somebody who uses the server while it is busy, in a process of its own: each kind of request at its own even pace.

    stdin ◀── one line of JSON: Probe     stdout ──▶ one line of JSON: milliseconds of every request, by kind

A request that is late because the one before took long counts from when it was due: nobody's waiting is left out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import msgspec

from benchmarks.load.asking import Asker
from serverless_gpu.ambient import new_run_id
from serverless_gpu.errors import ServerUnavailable
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.spec import Resources, RunSpec
from serverless_gpu.version import __version__
from serverless_gpu.wire.agents import AgentHello, AgentWelcome, Heartbeat
from serverless_gpu.wire.base import PROTOCOL
from serverless_gpu.wire.runs import RunRequest, Target

_CONTEXT = msgspec.Raw(msgspec.json.encode({"environ": {f"VARIABLE_{number}": "x" * 60 for number in range(50)}}))
NOWHERE = "B200"
"""A type of device that no node of these benchmarks has: what asks for it waits."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask.

    Attributes:
        run: a run to look at; "" when there is none.
        node_token: of a node to be; "" for none.
        every_s: from one request of a kind to the next.
    """

    url: str
    token: str
    seconds: float
    run: str = ""
    node_token: str = ""
    every_s: float = 0.1
    kinds: tuple[str, ...] = ("health", "list", "show", "submit", "heartbeat")


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """What came: milliseconds by kind, and requests that were refused or not answered at all, by kind."""

    ms: dict[str, list[float]]
    failed: dict[str, int]
    first_failure: str = ""


def request(machine: str, *, gpus: int = 1, gpu_type: str = "H100") -> RunRequest:
    """Return a run as a client asks for it, for the node on a machine."""
    spec = RunSpec(remote=True, environment="live", resources=Resources(gpus=gpus, gpu_type=gpu_type))
    target = Target(machine=machine, python="3.11", platform="linux-x86_64")
    return RunRequest(id=new_run_id(), spec=spec, target=target, context=_CONTEXT, call=b"x" * 1000)


def main() -> None:
    """Ask for as long as was said, then tell."""
    asked = msgspec.json.decode(sys.stdin.readline(), type=Probe)
    ms: dict[str, list[float]] = {kind: [] for kind in asked.kinds}
    failed = dict.fromkeys(asked.kinds, 0)
    failures: list[str] = []

    def pace(kind: str, ask: Callable[[], tuple[int, bytes]], offset_s: float) -> None:
        due, end = time.monotonic() + offset_s, time.monotonic() + asked.seconds
        while due < end:
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                status, said = ask()
            except ServerUnavailable as error:
                status, said = 0, str(error).encode()
            ms[kind].append((time.monotonic() - due) * 1000)
            if status == 0 or status >= 300:
                failed[kind] += 1
                failures.append(f"{kind}: {status} {said[:200]!r}")
            due += asked.every_s

    threads = []
    for number, kind in enumerate(asked.kinds):
        offset_s = asked.every_s * number / len(asked.kinds)
        threads.append(threading.Thread(target=pace, args=(kind, _asking(asked, kind), offset_s), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(msgspec.json.encode(Probed(ms=ms, failed=failed, first_failure="".join(failures[:1]))).decode(), flush=True)


def _asking(asked: Probe, kind: str) -> Callable[[], tuple[int, bytes]]:
    asker = Asker(asked.url, asked.token)
    if kind == "health":
        return lambda: asker.ask("GET", "/health")
    if kind == "list":
        return lambda: asker.ask("GET", "/runs?limit=50")
    if kind == "show":
        return lambda: asker.ask("GET", f"/runs/{asked.run}")
    if kind == "submit":
        return lambda: asker.ask("POST", "/runs", request("machine-probe", gpu_type=NOWHERE))
    node = Asker(asked.url, asked.node_token)
    devices = parse_fake("L4:8")
    welcome = node.get("POST", "/agents", _hello(), answer=AgentWelcome)
    return lambda: node.ask("POST", f"/agents/{welcome.node}/heartbeat", Heartbeat(devices=devices))


def _hello() -> AgentHello:
    return AgentHello(
        name="probe",
        machine="machine-probe",
        boot_id="probe-boot",
        version=__version__,
        protocol=PROTOCOL,
        python="3.11",
        platform="linux-x86_64",
        devices=parse_fake("L4:8"),
    )


if __name__ == "__main__":
    main()
