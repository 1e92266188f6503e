"""Who each rank is told to be, in gangs of every shape: the table of all variables that say so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from serverless_gpu.model.lifecycle.rendezvous import Chosen, variables
from serverless_gpu.model.placement import laid_out
from serverless_gpu.model.spec import Command, RayCluster, RunSpec
from serverless_gpu.node.attempt.claim import first_of
from serverless_gpu.node.base.protocol import Launch
from serverless_gpu.node.supervisor.attempt_files import attempt_files
from serverless_gpu.node.supervisor.rank_environment import Network, RankEnvironment
from tests.support.node.account import CONTEXT, DEVICES, launch

COLUMNS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "NUM_NODES")
OF_NODES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "POD_RANK", "NUM_NODES", "LOCAL_ADDR", "MASTER_ADDR")
NETWORK = Network(("10.0.0.1", 4000), "10.0.0.2", {"NCCL_SOCKET_IFNAME": "=eth1", "GLOO_SOCKET_IFNAME": "eth1"})
PER_NODE = RunSpec(payload=Command(argv=("torchrun",), per="node"))

TABLE = {
    (4,): [
        "0 0 4 4 0 0 1",
        "1 1 4 4 0 0 1",
        "2 2 4 4 0 0 1",
        "3 3 4 4 0 0 1",
    ],
    (2, 2): [
        "0 0 4 2 0 0 2",
        "1 1 4 2 0 0 2",
        "2 0 4 2 1 1 2",
        "3 1 4 2 1 1 2",
    ],
    (8, 4): [
        *(f"{rank} {rank} 12 8 0 0 2" for rank in range(8)),
        "8 0 12 4 1 1 2",
        "9 1 12 4 1 1 2",
        "10 2 12 4 1 1 2",
        "11 3 12 4 1 1 2",
    ],
    (1, 1, 1): [
        "0 0 3 1 0 0 3",
        "1 0 3 1 1 1 3",
        "2 0 3 1 2 2 3",
    ],
}


def launches(directory: Path, shape: tuple[int, ...], spec: RunSpec) -> list[Launch]:
    """Return what each node of a gang is to launch."""
    crews = laid_out([(f"n{number}", gpus) for number, gpus in enumerate(shape)])
    several = crews if len(crews) > 1 else ()
    return [
        msgspec.structs.replace(
            launch(directory), spec=spec, world_size=crew.gpus, crews=several, crew=crew.number, nonce="secret"
        )
        for crew in crews
    ]


def environments(launched: Launch, network: Network = NETWORK) -> list[dict[str, str]]:
    """Return the environments of a node's ranks."""
    made = RankEnvironment(launched, launched.context, attempt_files(launched))
    return [made.of(local, DEVICES, network) for local in range(len(launched.numbers))]


@pytest.mark.parametrize("shape", TABLE)
def test_every_rank_is_told_who_it_is(shape: tuple[int, ...], tmp_path: Path) -> None:
    said: list[str] = []
    numbers: list[int] = []
    for launched in launches(tmp_path, shape, RunSpec()):
        numbers += launched.numbers
        said += [" ".join(environ[name] for name in COLUMNS) for environ in environments(launched)]
        attempt = first_of(launched)
        assert (attempt.numbers, attempt.has_peers) == (launched.numbers, len(shape) > 1)
    assert said == TABLE[shape] and numbers == list(range(sum(shape)))


@pytest.mark.parametrize(
    ("shape", "table"),
    [
        ((4,), ["4 4 0 0 1 10.0.0.2 10.0.0.1"]),
        ((8, 4), ["12 8 0 0 2 10.0.0.2 10.0.0.1", "12 4 1 1 2 10.0.0.2 10.0.0.1"]),
        ((1, 1, 1), [f"3 1 {node} {node} 3 10.0.0.2 10.0.0.1" for node in range(3)]),
    ],
)
def test_a_command_that_runs_once_per_node_is_told_which_node_it_is_on(
    shape: tuple[int, ...], table: list[str], tmp_path: Path
) -> None:
    all_of_it = launches(tmp_path, shape, PER_NODE)
    [*told] = [environ for launched in all_of_it for environ in environments(launched)]
    assert [" ".join(environ[name] for name in OF_NODES) for environ in told] == table
    assert not {"RANK", "LOCAL_RANK", "GROUP_RANK", "TORCHELASTIC_RUN_ID"} & {name for one in told for name in one}
    assert [[*launched.numbers] for launched in all_of_it] == [[node] for node in range(len(shape))]


def test_a_driver_of_ray_is_alone_wherever_its_node_stands(tmp_path: Path) -> None:
    for node, launched in enumerate(launches(tmp_path, (8, 4), RunSpec(ray=RayCluster()))):
        [environ] = environments(launched)
        assert " ".join(environ[name] for name in COLUMNS) == f"0 0 1 1 {node} {node} 2"
        assert [*launched.numbers] == [node]


def test_all_nodes_meet_at_one_place_each_by_its_own_interface(tmp_path: Path) -> None:
    chosen = Chosen(master=("10.0.0.1", 4000), interfaces=("eth0", "ib0"), addresses=("10.0.0.1", "10.0.0.2"))
    for launched, interface in zip(launches(tmp_path, (2, 2), RunSpec()), chosen.interfaces, strict=True):
        crew = launched.crew
        for environ in environments(launched, Network(chosen.master, chosen.addresses[crew], variables(chosen, crew))):
            assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "4000")
            assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == (f"={interface}", interface)


def test_what_the_caller_says_of_interfaces_wins(tmp_path: Path) -> None:
    [launched, _] = launches(tmp_path, (2, 2), RunSpec())
    context = msgspec.structs.replace(CONTEXT, environ={"NCCL_SOCKET_IFNAME": "^docker", "MASTER_PORT": "1"})
    environ = RankEnvironment(launched, context, attempt_files(launched)).of(0, DEVICES, NETWORK)
    assert (environ["NCCL_SOCKET_IFNAME"], environ["GLOO_SOCKET_IFNAME"]) == ("^docker", "eth1")
    assert environ["MASTER_PORT"] == "4000"
