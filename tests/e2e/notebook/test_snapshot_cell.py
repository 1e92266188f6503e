"""`env="snapshot"` in a notebook: what a cell defines runs in the restored copy; the capture is in a status."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.local.small_environment import SmallEnvironment
from tests.support.notebook.kernel import started

CALL = """
from serverless_gpu import distributed

@distributed(gpus=2, gpu_type="H100", env="snapshot")
def where(rank):
    import beside, toy
    print("rank", rank)
    return [rank, toy.VALUE, beside.VALUE, beside.__file__]

where.distributed()
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_cell_runs_in_the_restored_copy(at_home: Path, tmp_path: Path) -> None:
    environment = SmallEnvironment(tmp_path / "here", "ipykernel")
    environment.install("toy", "1.0", {"toy/__init__.py": "VALUE = 'one'\n"})
    beside = environment.write("beside.py", "VALUE = 1\n")
    variables = {"SERVERLESS_GPU_HOME": str(at_home), "SERVERLESS_GPU_FAKE": "H100:4"}
    with started(environment.project, str(environment.python), **variables) as kernel:
        shown = kernel.run(CALL)
        assert shown.error == ("", "")
        copy = str(at_home / "environments" / "view" / "code")
        ranks = eval(shown.result)
        assert [rank[:3] for rank in ranks] == [[0, "one", 1], [1, "one", 1]]
        assert all(rank[3].startswith(copy) for rank in ranks)
        capture, _, _ = shown.displayed()
        *_, receipt = shown.displayed("text/html")
        assert capture.startswith("CAPTURED environment ") and golden("notebook.snapshot_cell.project-code") in capture
        assert ">environment<" in receipt and ">snapshot " in receipt
        beside.write_text("VALUE = 2\n")
        again = kernel.run("where.distributed()")
        assert [rank[2] for rank in eval(again.result)] == [2, 2]
