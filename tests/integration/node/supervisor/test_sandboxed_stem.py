"""What a supervisor believes of a stem whose memory a principal's code has written."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from serverless_gpu.node.inside import protocol as inside
from serverless_gpu.node.supervisor.gang import HostStem
from tests.support.node.gang import Line

NOBODY = 65_534


def test_27_a_stem_in_a_sandbox_names_no_cgroups_and_no_end(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "cgroup.kill").touch()
    own = tmp_path / "own"
    own.mkdir()
    (own / "cgroup.kill").touch()
    (own / "cgroup.events").write_text("populated 1\n")
    uid = os.getuid() or NOBODY
    with subprocess.Popen(["sleep", "60"], user=uid) as stem:
        line = Line(tmp_path, stem=HostStem(stem.pid, (str(own),)), uid=uid)
        try:
            line.hear(event="standby", version=inside.VERSION, pid=1, cgroups=[str(trap)])
            line.hear(event="empty")
            assert line.gang.cgroup == own and not line.gang.empty()
            line.gang.kill()
            stem.wait(10)
            (own / "cgroup.events").write_text("populated 0\n")
            assert line.gang.empty()
            assert ((trap / "cgroup.kill").read_text(), (own / "cgroup.kill").read_text()) == ("", "1")
        finally:
            stem.kill()
            line.rank.close()
            line.gang.close()
    assert trap.exists()


def test_27_a_process_of_another_uid_is_not_the_stem(tmp_path: Path) -> None:
    line = Line(tmp_path, stem=HostStem(os.getpid(), ()), uid=os.getuid() + 1)
    with pytest.raises(ValueError, match=f"process {os.getpid()} is not the stem"):
        line.hear(event="standby", version=inside.VERSION, pid=1, cgroups=[])
    line.rank.close()
    line.gang.close()
