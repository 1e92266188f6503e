"""C8: a gang of which one node is silent keeps no device of the other node, once user code has returned there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local.observe import announced, wait_for
from tests.support.remote.gang_work import stay
from tests.support.remote.machines import Machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 60.0
"""After the silence is seen, as the bar says. The hard fence is at 15 minutes: nothing here waits for it."""


@pytest.fixture
def pool(home: Path) -> Iterator[Machines]:
    """Yield a server that soon sees silence, with two nodes of two GPUs each."""
    with Machines(home, "Settings.soft_expiry_s=4", "Settings.heartbeat_s=0.5") as pool:
        pool.join("n1")
        pool.join("n2")
        yield pool


@pytest.mark.long
@pytest.mark.parametrize("silent", ["n1", "n2"])
def test_22C8_a_gang_whose_uplink_is_gone_for_good_gives_the_other_nodes_devices_back(
    pool: Machines, tmp_path: Path, silent: str
) -> None:
    """With rank 0 on the silent node, and on the other one."""
    other = pool.nodes["n2" if silent == "n1" else "n1"]
    run = pool.submit(stay, str(tmp_path))
    for rank in range(4):
        announced(tmp_path, f"1.rank{rank}")
    uplink = pool.nodes[silent].uplink()
    uplink.send(signal.SIGKILL)
    uplink.wait_gone()
    wait_for(lambda: pool.view(run).state == "UNREACHABLE", "the silence is seen", LIMIT_S)
    assert not other.is_free()  # user code runs there
    (tmp_path / "go").touch()
    wait_for(other.is_free, f"nothing of the run is left on {other.name}", LIMIT_S)

    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "go").touch()
    after = pool.submit(stay, str(tmp_path / "next"), gpus=2)
    assert after.results(LIMIT_S) == [0, 1]
    assert pool.view(after).node == other.name
    assert pool.view(run).state == "UNREACHABLE"  # the silent node is fenced, and may still say how the run ends

    pool.nodes[silent].start()
    assert run.results(LIMIT_S) == [0, 1, 2, 3]
