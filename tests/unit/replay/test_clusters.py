"""Clusters as they are typed, and as files tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.scheduling.values import Pool
from serverless_gpu.replay import Machine, cluster_of, read_cluster
from tests.support.golden import golden

FILE = """
[[nodes]]
count = 2
gpus = 8
type = "H100"
pool = "research"

[[nodes]]
gpus = 4
name = "old"

[[pools]]
name = "research"
reserved = true
lends = true
return = "10m"

[teams]
search = 70
"""


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "gang"), [("8x8", 8, 64, 8), (" 3 x 4", 3, 12, 4), ("1x600", 1, 600, 8)]
)
def test_nodes_and_gpus_of_each(text: str, nodes: int, gpus: int, gang: int) -> None:
    cluster = read_cluster(text)
    assert (len(cluster.machines), cluster.gpus, cluster.gang_gpus) == (nodes, gpus, gang)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(FILE, encoding="utf-8")
    cluster = read_cluster(str(path))
    assert cluster.machines == (
        Machine(name="n1", gpus=8, gpu_type="H100", pool="research"),
        Machine(name="n2", gpus=8, gpu_type="H100", pool="research"),
        Machine(name="old3", gpus=4),
    )
    assert cluster.pools == (Pool(name="research", reserved=True, lends=True, return_s=600),)
    assert (cluster.teams, cluster.gang_gpus, cluster.text()) == ({"search": 70}, 8, "3 nodes, 20 GPUs")


def test_a_cluster_as_one_sum() -> None:
    assert cluster_of(75, 8).as_sum().machines == (Machine(name="all", gpus=600),)
    assert cluster_of(75, 8).as_sum().text() == golden("replay.clusters.600-gpus-one")
    assert cluster_of(75, 8).as_sum().gang_gpus == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a valid cluster file"),
        ("[[nodes]]\ngpus = 0", "is not a valid cluster file"),
        ("[[nodes]]\ngpu = 8", "gpu"),
        ("[[nodes]]\ngpus = 8\ncount = 99999\n[[nodes]]\ngpus = 8\ncount = 99999", "more than 100000 nodes"),
        ('[[nodes]]\ngpus = 8\npool = "a"\n[[pools]]\nname = "b"', "pool a, which the file does not define"),
        ('[[nodes]]\ngpus = 8\n[[pools]]\nname = "b"\nreturn = "soon"', "'soon' is not a duration"),
        ("[[nodes]]\ngpus = 8\n[teams]\nsearch = -1", "is not a valid cluster file"),
    ],
)
def test_what_is_no_file_of_a_cluster(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidValue, match=words):
        read_cluster(str(path))


@pytest.mark.parametrize("text", ["8", "8x", "x8", "gone.toml", "0x8", "8x0", "999999x1"])
def test_what_is_no_cluster(text: str) -> None:
    with pytest.raises(InvalidValue):
        read_cluster(text)
