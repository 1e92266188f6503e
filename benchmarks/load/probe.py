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
AT_ONCE = 4
"""Requests of one kind that may be on their way at once: one that is late does not make the next one late."""
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
            due += AT_ONCE * asked.every_s

    threads = []
    for number, kind in enumerate(asked.kinds):
        ask_of = _asking(asked, kind)
        for one in range(AT_ONCE):
            offset_s = asked.every_s * (one + number / len(asked.kinds))
            threads.append(threading.Thread(target=pace, args=(kind, ask_of(), offset_s), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(msgspec.json.encode(Probed(ms=ms, failed=failed, first_failure="".join(failures[:1]))).decode(), flush=True)


def _asking(asked: Probe, kind: str) -> Callable[[], Callable[[], tuple[int, bytes]]]:
    """Return what makes a connection for one kind of request."""
    if kind != "heartbeat":
        return lambda: _request(Asker(asked.url, asked.token), asked, kind)
    welcome = Asker(asked.url, asked.node_token).get("POST", "/agents", _hello(), answer=AgentWelcome)
    beat = Heartbeat(devices=parse_fake("L4:8"))

    def node() -> Callable[[], tuple[int, bytes]]:
        asker = Asker(asked.url, asked.node_token)
        return lambda: asker.ask("POST", f"/agents/{welcome.node}/heartbeat", beat)

    return node


def _request(asker: Asker, asked: Probe, kind: str) -> Callable[[], tuple[int, bytes]]:
    if kind == "health":
        return lambda: asker.ask("GET", "/health")
    if kind == "list":
        return lambda: asker.ask("GET", "/runs?limit=50")
    if kind == "show":
        return lambda: asker.ask("GET", f"/runs/{asked.run}")
    return lambda: asker.ask("POST", "/runs", request("machine-probe", gpu_type=NOWHERE))


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
