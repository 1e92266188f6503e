"""What Ray is started with: the whole of it, compared; and what is refused before Ray makes something else of it."""

from __future__ import annotations

import json

import pytest

from serverless_gpu.engines.ray import start_arguments
from serverless_gpu.engines.ray.start_arguments import MachineShare
from serverless_gpu.errors import InvalidValue
from tests.support.golden import golden

NODE = MachineShare(
    name="gpu-2",
    address="10.0.0.6",
    port=7900,
    directory="/tmp/sgpu-pool-0a1b2c3d/ray",
    token_file="/home/ada/.serverless_gpu/ray/token",
    node_file="/home/ada/.serverless_gpu/ray/node.json",
    gpus=("GPU-aaaa", "GPU-bbbb", "GPU-cccc"),
    types=("H100", "H100", "A10", "CPU", "CPU"),
)
COMMON = [
    "--node-ip-address=10.0.0.6",
    "--node-manager-port=7901",
    "--object-manager-port=7902",
    "--runtime-env-agent-port=7903",
    "--dashboard-agent-grpc-port=7904",
    "--dashboard-agent-listen-port=7905",
    "--metrics-export-port=7906",
    "--min-worker-port=7920",
    "--max-worker-port=7999",
    "--num-gpus=3",
    "--num-cpus=2",
    '--resources={"sgpu_node:gpu-2": 1, "sgpu_gpus:H100": 2, "sgpu_gpus:A10": 1, "sgpu_gpus:CPU": 2, '
    '"accelerator_type:H100": 1, "accelerator_type:A10": 1}',
    "--object-store-memory=80000000",
    "--temp-dir=/tmp/sgpu-pool-0a1b2c3d/ray",
    "--include-log-monitor=false",
    "--disable-usage-stats",
    "--log-style=record",
    "--log-color=false",
]
START = ["/opt/env/bin/python", "-m", "ray.scripts.scripts", "start", "--block"]


def test_a_machine_joins_with_every_port_named() -> None:
    command = start_arguments.join_command("/opt/env/bin/python", NODE, "10.0.0.5:7900")
    assert command == [*START, "--address=10.0.0.5:7900", *COMMON]


def test_the_head_is_a_node_too_and_knows_within_seconds_that_a_machine_is_gone() -> None:
    health = (
        '{"health_check_initial_delay_ms": 2000, "health_check_period_ms": 1000, '
        '"health_check_timeout_ms": 1000, "health_check_failure_threshold": 5}'
    )
    tail = ["--include-dashboard=false", "--dashboard-port=7908", "--no-monitor", f"--system-config={health}"]
    assert start_arguments.head_command("/opt/env/bin/python", NODE) == [
        *START,
        "--head",
        "--port=7900",
        *COMMON,
        *tail,
    ]


def test_a_head_without_devices_offers_nothing_and_one_that_serves_clients_does_so_at_its_own_port() -> None:
    bare = MachineShare(name="gpu-1", address="10.0.0.5", directory="/tmp/x", token_file="/t", client=True)
    command = start_arguments.head_command("python", bare)
    assert {"--num-gpus=0", "--num-cpus=0", "--resources={}", "--ray-client-server-port=7907"} <= set(command)
    assert start_arguments.NODE_FILE not in start_arguments.environment(bare, {})


def test_variables_are_the_clean_ones_and_ours_and_nothing_of_another_ray() -> None:
    clean = {"PATH": "/bin", "RAY_ADDRESS": "10.9.9.9:6379", "RAY_AUTH_MODE": "disabled"}
    assert start_arguments.environment(NODE, clean) == {
        "PATH": "/bin",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": "/home/ada/.serverless_gpu/ray/token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_raylet_start_wait_time_s": "120",
        "AUTOSCALER_METRIC_PORT": "7909",
        "DASHBOARD_METRIC_PORT": "7910",
        "CUDA_VISIBLE_DEVICES": "GPU-aaaa,GPU-bbbb,GPU-cccc",
        "SERVERLESS_GPU_RAY_NODE": "/home/ada/.serverless_gpu/ray/node.json",
    }


def test_no_secret_is_in_a_command_or_in_a_variable() -> None:
    everything = json.dumps([start_arguments.head_command("python", NODE), start_arguments.environment(NODE, {})])
    assert "token" in everything  # the path of its file, and that is all
    assert everything.count("/home/ada/.serverless_gpu/ray/token") == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_that_ray_would_replace_is_refused_by_name(address: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        start_arguments.check_node_address(address)
    assert refused.value.message == golden("engines.ray_start.machine-cannot-address", address=address)
    assert refused.value.hint == golden("engines.ray_start.node-address-one")


@pytest.mark.parametrize("address", ["0.0.0.0", "224.0.0.1", "gpu-1", "10.0.0.5:7900", ""])
def test_what_is_not_the_address_of_one_machine_is_refused(address: str) -> None:
    with pytest.raises(InvalidValue, match=r"is not an IP address|does not identify"):
        start_arguments.check_node_address(address)


@pytest.mark.parametrize("port", [0, 80, 1023, 65_437, 70_000])
def test_a_port_without_room_for_a_hundred_is_refused(port: int) -> None:
    with pytest.raises(InvalidValue, match="cannot start at"):
        start_arguments.ports(port)


def test_ports_are_in_one_range_and_none_is_used_twice() -> None:
    found = start_arguments.ports(65_436)
    assert len(set(found)) == len(found)
    assert max(found) < 65_436 + start_arguments.WORKERS_FROM
    assert start_arguments.port_range(7900) == "7900-7999"


@pytest.mark.parametrize("text", ["", "  ", "two words", "söme", "a\x00b"])
def test_what_ray_would_not_take_as_a_token_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue, match="not a valid token"):
        start_arguments.check_token(text)


def test_addresses_of_the_sixth_version_get_their_brackets() -> None:
    assert start_arguments.joined("fd00::5", 7900) == "[fd00::5]:7900"
    assert start_arguments.joined("10.0.0.5", 7900) == "10.0.0.5:7900"
