"""Memory of the whole machine runs out: row F03 of the failure matrix.

Caller, agent, supervisors and ranks of a test are in a control group with little memory, so for the kernel the machine
is that small: it ends a process when there is no more, and by its own choice.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.testing import stop_agent
from tests.support.golden import golden
from tests.support.local.observe import processes_of, wait_for
from tests.support.local.small_machine import small_memory

LIMIT_BYTES = 1 << 30

IN_A_SMALL_MACHINE = """
import contextlib, json, os, pathlib, sys, time

with open(sys.argv[1] + "/cgroup.procs", "w") as file:
    file.write("0")
from serverless_gpu import distributed
from serverless_gpu.errors import OutOfMemory
from serverless_gpu.testing import agent_status

where = sys.argv[2]

@distributed(gpus=1, quiet=True)
def modest(where):
    open(where + "/modest", "w").close()
    while not os.path.exists(where + "/go"):
        time.sleep(0.02)
    return open("/proc/self/oom_score_adj").read().strip()

@distributed(gpus=1, quiet=True)
def grows(where):
    while not os.path.exists(where + "/modest"):
        time.sleep(0.02)
    kept = []
    while True:
        kept.append(bytearray(16 << 20))

other = modest.submit(where)
run = grows.submit(where)
said = {}
try:
    run.results(timeout=90)
except OutOfMemory as error:
    said["reason"], said["text"] = error.reason, str(error)
status = agent_status(pathlib.Path(os.environ["SERVERLESS_GPU_HOME"]))
said["agent"] = status.pid
said["agent_score"] = open(f"/proc/{status.pid}/oom_score_adj").read().strip()
said["supervisors"] = []
for attempt in status.attempts:
    with contextlib.suppress(FileNotFoundError):  # that of the run that ended is on its way out
        said["supervisors"].append(open(f"/proc/{attempt.pid}/oom_score_adj").read().strip())
open(where + "/go", "w").close()
said["other"] = other.results(timeout=60)[0]
said["state"] = run.receipt(timeout=60).state
said["same_agent"] = agent_status(pathlib.Path(os.environ["SERVERLESS_GPU_HOME"])).pid == status.pid
said["again"] = distributed(gpus=1, quiet=True)(len).distributed("abc")
print(json.dumps(said))
"""


@pytest.fixture
def small_machine() -> Iterator[Path]:
    """Yield a control group with little memory."""
    with small_memory(LIMIT_BYTES) as path:
        yield path


@pytest.mark.slow
def test_F03_the_rank_that_grew_is_the_victim_and_nobody_else(
    home: Path, small_machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2")
    program = tmp_path / "script.py"
    program.write_text(IN_A_SMALL_MACHINE)
    done = subprocess.run(
        [sys.executable, str(program), str(small_machine), str(tmp_path)], capture_output=True, text=True, timeout=110
    )
    (tmp_path / "go").touch()
    stop_agent(home)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: not processes_of(home), "agent and supervisors are gone")
    said = json.loads(done.stdout)
    assert said["reason"] == "host_oom", said
    assert golden("local.host_memory.rank-ended-kernel") in said["text"]
    assert said["state"] == "FAILED"
    assert said["same_agent"], "the agent lived"
    assert int(said["other"]) >= 500, "the other run went on, though its rank was in line, too"
    assert said["again"] == [3], "the next run starts"
    # Only who has CAP_SYS_RESOURCE may lower it; for everybody else the 500 of the ranks are what decides.
    expected = "-900" if _may_be_protected() else said["agent_score"]
    assert said["agent_score"] == expected and int(expected) <= 200
    assert said["supervisors"] and set(said["supervisors"]) == {expected}


def _may_be_protected() -> bool:
    """Return whether a process like this one may be the kernel's last choice."""
    program = "open('/proc/self/oom_score_adj', 'wb', 0).write(b'-900')"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
