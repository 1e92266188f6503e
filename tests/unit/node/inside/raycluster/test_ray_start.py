"""What Ray's processes on a node are told: arguments, variables, ports; and what they wrote last."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from serverless_gpu.node.inside.raycluster import ray_installation, ray_start
from serverless_gpu.node.inside.raycluster.ray_start import Ports
from tests.support.golden import golden
from tests.support.node.ray_cluster import SHARE

PORTS = Ports(*range(12_000, 12_000 + len(Ports._fields)))


def test_what_belongs_to_another_cluster_or_to_torchs_world_goes_and_what_tunes_a_library_stays() -> None:
    caller = {
        "RAY_ADDRESS": "192.0.2.1:6379",
        "RAY_AUTH_TOKEN": "another's",
        "RAY_TMPDIR": "/elsewhere",
        "RAY_TEMP_DIR": "/elsewhere",
        "RANK": "0",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "29500",
        "DASHBOARD_METRIC_PORT": "44227",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAYON_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    kept = {
        "RAY_DEDUP_LOGS",
        "RAY_TRAIN_V2_ENABLED",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAYON_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
    }
    assert set(ray_start.stripped_variables(caller)) == kept


def test_a_cluster_of_one_node_is_kept_to_loopback_and_asks_for_its_token() -> None:
    own = ray_start.cluster_variables(SHARE, token=True)
    assert own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert own["RAY_AUTH_MODE"] == "token"
    assert own["RAY_AUTH_TOKEN_PATH"] == "/tmp/sgpu-ray-0/token"
    assert own["RAY_USAGE_STATS_ENABLED"] == "0"
    several = ray_start.cluster_variables(SHARE._replace(num_nodes=2), token=False)
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in several
    assert "RAY_AUTH_MODE" not in several


def test_a_token_is_the_runs_and_does_not_tell_its_secret() -> None:
    one, other = ray_start.token_of("1" * 64), ray_start.token_of("2" * 64)
    assert one == ray_start.token_of("1" * 64) != other
    assert len(one) == 64 and int(one, 16) and one != "1" * 64


def test_every_port_a_head_listens_on_is_named() -> None:
    arguments = ray_start.head_arguments(SHARE._replace(dashboard=True), PORTS, "/tmp/sgpu-ray-0/1", client=True)
    told = [ray_start.port_variables(PORTS, "127.0.0.1:12000"), *arguments]
    assert all(str(port) in str(told) for port in PORTS)
    assert "--resources=" + json.dumps({"accelerator_type:H100": 1}) in arguments
    assert {"--head", "--block", "--disable-usage-stats", "--dashboard-host=127.0.0.1"} <= set(arguments)


def test_a_head_serves_clients_and_a_page_only_where_that_can_be_had() -> None:
    arguments = ray_start.head_arguments(SHARE, PORTS, "/tmp/sgpu-ray-0/1", client=False)
    assert "--include-dashboard=false" in arguments
    assert not any("client-server" in argument for argument in arguments)


def test_slots_of_the_cpu_are_no_gpus() -> None:
    arguments = ray_start.head_arguments(SHARE._replace(accelerator=""), PORTS, "/tmp/sgpu-ray-0/1", client=False)
    assert "--num-gpus=0" in arguments
    assert not any(argument.startswith("--resources") for argument in arguments)


def test_a_node_of_several_joins_with_its_own_address() -> None:
    own = SHARE._replace(num_nodes=2, node_rank=1, address="192.0.2.7")
    arguments = ray_start.worker_arguments(own, PORTS, "/tmp/sgpu-ray-0/1", "192.0.2.6:12000")
    assert {"--address=192.0.2.6:12000", "--node-ip-address=192.0.2.7"} <= set(arguments)
    assert "--head" not in arguments
    assert ray_start.cluster_address(own._replace(node_rank=0), PORTS) == "192.0.2.7:12000"
    assert ray_start.cluster_address(SHARE, PORTS) == "127.0.0.1:12000"


@pytest.mark.parametrize(
    ("nodes", "accelerator", "page", "said"),
    [
        (1, "H100", "", "Ray 2.60.0: 1 node, 2 H100, 3 CPUs, object store 0.1 GB"),
        (1, "", "", "Ray 2.60.0: 1 node, 3 CPUs, object store 0.1 GB"),
        (2, "A10", "", "Ray 2.60.0: 2 nodes, 4 A10, 6 CPUs, object store 0.1 GB on each"),
        (1, "A10", "http://x", "Ray 2.60.0: 1 node, 2 A10, 3 CPUs, object store 0.1 GB, dashboard http://x"),
    ],
)
def test_what_is_said_when_it_is_there(nodes: int, accelerator: str, page: str, said: str) -> None:
    own = SHARE._replace(accelerator=accelerator)
    assert ray_start.ready_sentence(own, [own] * nodes, "2.60.0", page) == said


@pytest.mark.parametrize(
    ("version", "knows"), [("2.49.1", False), ("2.52.0", True), ("2.60.0", True), ("3.0.0.dev0", True), ("2.9", False)]
)
def test_which_ray_knows_tokens(version: str, knows: bool) -> None:
    assert ray_installation.knows_tokens(version) is knows


def test_a_ray_without_metadata_says_its_version_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    monkeypatch.setattr(ray_installation, "origin", lambda: str(tmp_path / "__init__.py"))
    assert ray_installation.version() == ""
    assert ray_installation.ray_version() == golden("node.ray_cluster.unknown-version")
    (tmp_path / "_version.py").write_text('commit = "abc"\nversion = "2.55.1"\n')
    assert ray_installation.ray_version(2) == "2.55.1"
    monkeypatch.setattr(ray_installation, "origin", lambda: "")
    with pytest.raises(ModuleNotFoundError, match=re.escape(golden("node.ray_cluster.installed-environment-run"))):
        ray_installation.ray_version()


def logs_of(directory: Path, number: str = "1") -> Path:
    logs = directory / number / "session_2026-11-22_07-00-00_0_1" / "logs"
    logs.mkdir(parents=True)
    (directory / number / "session_latest").symlink_to(logs.parent)
    return logs


def test_why_ray_ended_is_the_line_of_a_failed_check_before_the_last_lines(tmp_path: Path) -> None:
    logs = logs_of(tmp_path)
    (tmp_path / "1" / ray_start.OUTPUT_FILE).write_text("started\n\nSome Ray subprocesses exited unexpectedly\n")
    assert ray_start.last_words(str(tmp_path / "1")).endswith("exited unexpectedly")
    plain = "2026-11-22 07:54:15,552\tINFO scripts.py:1002 -- To terminate the Ray runtime, run\n"
    (tmp_path / "1" / ray_start.OUTPUT_FILE).write_text(f"{plain}ValueError: no room\n{plain}")
    assert ray_start.last_words(str(tmp_path / "1")) == "ValueError: no room"
    check = "[2026-11-22 07:14:47,118 C 78 78] (raylet) agent.cc:1: Check failed: Timed out waiting for a file"
    (logs / "raylet.out").write_text(f"[2026-11-22 07:14:46,1 I 78 78] (raylet) fine\n{check}\n*** stack ***\n @ 0x1\n")
    assert ray_start.last_words(str(tmp_path / "1")) == check
    assert ray_start.last_words(str(tmp_path / "nowhere")) == ""
