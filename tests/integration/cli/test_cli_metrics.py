"""`sgpu metrics`, and what `sgpu show` says of devices, over run directories made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serverless_gpu.cli.runs.run_details import use_lines
from serverless_gpu.model.receipt import DeviceUse
from tests.support.cli.cli import FIRST, RECEIPT, SPEC, sgpu
from tests.support.client.plotted import ORIGIN_NS, attempt, telemetry
from tests.support.golden import golden

GPU = "system/node_0/gpu_1_utilization_percentage"
USES = [
    {"uuid": "A", "samples": 2, "busy_percent": 87.4, "peak_memory_bytes": 61_300_000_000, "throttled_s": 12.5},
    {"uuid": "B", "samples": 2, "busy_percent": 3.0, "peak_memory_bytes": None},
]
TABLE = [
    "#  BUSY  PEAK MEMORY  THROTTLED  DEVICE",
    "0  87 %  57.1 GiB     12.5 s     A",
    "1  3 %   -            -          B",
]


@pytest.fixture
def directory(home: Path) -> Path:
    """Return the directory of an attempt that was sampled three times."""
    made = attempt(home / "runs" / FIRST, 1, [telemetry(3, gpus=2)])
    (made / "spec.json").write_text(json.dumps(SPEC))
    return made


def test_metrics_are_a_table_of_series(directory: Path) -> None:
    lines = sgpu("metrics", FIRST[:12]).output.splitlines()
    assert lines[0].split() == ["SERIES", "SAMPLES", "LEAST", "MEAN", "MOST", "LAST"]
    assert [GPU, "3", "15.0", "15.0", "15.0", "15.0"] in [line.split() for line in lines]


def test_metrics_as_json_are_every_sample(directory: Path) -> None:
    value = json.loads(sgpu("metrics", "--json").output)
    assert value[GPU] == {"times": [ORIGIN_NS / 1e9 + second for second in range(3)], "values": [15.0] * 3}


def test_metrics_as_a_picture(directory: Path, tmp_path: Path) -> None:
    done = sgpu("metrics", "--plot", str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout == "" and FIRST in done.stderr


def test_a_run_that_was_not_sampled_has_no_metrics(directory: Path) -> None:
    (directory / "logs" / "0.telemetry").unlink()
    assert sgpu("metrics").stderr == golden("cli.cli_metrics.nothing-sampled-run", FIRST=FIRST)
    assert sgpu("metrics", "--json").output == "{}\n"


def test_show_tells_what_each_device_did(directory: Path) -> None:
    (directory / "receipt.json").write_text(json.dumps(RECEIPT | {"uses": USES}))
    shown = sgpu("show").output
    assert "\n".join(["", "devices:", *(f"  {line}" for line in TABLE), ""]) in shown


def test_show_tells_what_devices_of_a_run_without_receipt_did_so_far(directory: Path) -> None:
    shown = sgpu("show").output
    assert golden("cli.cli_metrics.devices-so-far") in shown
    assert "  1  15 %  38.2 GiB" in shown


def test_one_device_needs_no_table() -> None:
    assert use_lines([DeviceUse(uuid="A", samples=3, busy_percent=50.0)]) == []
    assert use_lines([]) == []


def test_devices_of_several_nodes_are_told_with_their_node() -> None:
    uses = [DeviceUse(uuid=uuid, samples=1, busy_percent=50.0) for uuid in "ABC"]
    assert use_lines(uses, ["n1", "n1", "n2"]) == [
        "#  BUSY  NODE  DEVICE",
        "0  50 %  n1    A",
        "1  50 %  n1    B",
        "2  50 %  n2    C",
    ]
    assert use_lines(uses, ["n1"])[0] == "#  BUSY  DEVICE"  # nobody knows whose they are: a node told nothing


def test_a_table_has_a_bound() -> None:
    lines = use_lines([DeviceUse(uuid=str(place), samples=1, busy_percent=1.0) for place in range(200)])
    assert len(lines) == 130 and lines[-1] == "and 72 more"
