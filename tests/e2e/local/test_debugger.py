"""`breakpoint()` in a rank: what the caller is told, and that the way it is told works."""

from __future__ import annotations

import bdb
import re
import subprocess
import sys
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu.client.runs.outcome import rebuild_exception
from tests.support.golden import golden


def stop_in_the_middle() -> int:
    value = 41
    breakpoint()
    return value + 1


def test_23C2_breakpoint_in_a_rank_says_what_works_and_that_works(warm: Path) -> None:
    with pytest.raises(bdb.BdbQuit) as raised:
        distributed(gpus=1, gpu_type="CPU", quiet=True)(stop_in_the_middle).distributed()
    note = raised.value.__notes__[-1]
    assert note.startswith("a rank has no terminal, so breakpoint() and pdb end at once; run `python /")
    program = re.findall(r"`python (.*)`", note)[0]
    command = [sys.executable, program]
    done = subprocess.run(command, input="p value + 1000\nc\n", capture_output=True, text=True, check=True, timeout=60)
    assert "(Pdb) 1041" in done.stdout and "rank 0 returned 42" in done.stdout


def test_23C2_another_failure_is_told_as_before(warm: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        distributed(gpus=1, gpu_type="CPU", quiet=True)(fail).distributed()
    assert "terminal" not in "".join(raised.value.__notes__)


@pytest.mark.parametrize("log", ["`sgpu logs r --rank 0`", "/nowhere/1/logs/0.stdout"])
def test_23C2_where_the_program_is_on_another_machine_a_plain_call_is_offered(log: str) -> None:
    said = {"module": "bdb", "type": "BdbQuit", "kind": "exception"}
    error = rebuild_exception(said, None, rank=0, host="node", run_id="r", log_path=log)
    assert golden("local.debugger.call-function-itself") in error.__notes__[-1]
