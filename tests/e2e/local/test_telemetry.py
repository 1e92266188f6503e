"""Telemetry of real runs: what their receipt and their series say of the devices, also across a dead monitor."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu import Run, distributed
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.monitor import messages
from serverless_gpu.testing import FakeGpus
from tests.support.local.observe import Process, wait_for
from tests.support.local.ranks import stay

BUSY = "system/node_0/gpu_0_utilization_percentage"


def sampled(run: Run[int]) -> int:
    """Return how many rows there are of a run."""
    return len(run.metrics()[BUSY].values) if BUSY in run.metrics() else 0


def go_on(where: str) -> None:
    """Let the ranks return."""
    (Path(where) / "go").touch()


def test_receipt_and_series_say_what_the_gpus_did(own: Path, where: str) -> None:
    fakes = FakeGpus(own)
    for number in range(2):
        fakes.shows(f"FAKE-H100-{number}", busy_percent=90 + number, memory_bytes=61 << 30, power_watts=500, throttle=4)
    run = distributed(gpus=2, quiet=True)(stay).submit(where)
    wait_for(lambda: sampled(run) >= 3, "three rows")
    go_on(where)
    assert run.results() == [0, 1]
    receipt = run.receipt()
    assert [(use.uuid, use.busy_percent) for use in receipt.uses] == [("FAKE-H100-0", 90.0), ("FAKE-H100-1", 91.0)]
    for use in receipt.uses:
        assert use.samples >= 3
        assert use.peak_memory_bytes == 61 << 30
        assert use.energy_joules is not None and use.energy_joules >= 500  # two seconds of 500 W, more or less
        assert use.throttled_s is not None and use.throttled_s >= 2
    metrics = run.metrics()
    assert set(metrics[BUSY].values) == {90.0}
    assert set(metrics["system/node_0/gpu_1_power_usage_watts"].values) == {500.0}
    assert min(metrics["system/node_0/rank_1_memory_usage_megabytes"].values) > 1
    assert metrics["system/node_0/cpu_utilization_percentage"].values
    rows = (run.directory / "logs" / "0.telemetry").read_bytes()
    assert rows.startswith(b"{") and rows.count(b"\n{") == 0


def test_F44_a_monitor_that_is_killed_costs_seconds_and_doubles_nothing(own: Path, where: str) -> None:
    run = distributed(gpus=1, quiet=True)(stay).submit(where)
    wait_for(lambda: sampled(run) >= 2, "two rows")
    lock = messages.monitor_socket(Home(own).sockets()).with_suffix(".lock")
    note = held_note(lock)
    assert note is not None
    Process(int(note.split()[0])).kill()
    before = sampled(run)
    # The next call's agent starts another; the run that goes on is in its files and its account as before.
    assert distributed(gpus=1, quiet=True)(os.getpid).distributed()
    wait_for(lambda: sampled(run) >= before + 2, "rows of the next monitor")
    go_on(where)
    assert run.results() == [0]
    times = run.metrics()[BUSY].times
    assert times == sorted(set(times))
    assert [use.samples for use in run.receipt().uses] >= [before + 2]
    rows = (run.directory / "logs" / "0.telemetry").read_bytes()
    assert rows.count(b"\n{") == 0  # one header is enough
