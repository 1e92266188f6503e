"""`Run.metrics()` and `Run.plot()`: what is read of a run's directories, and what the picture says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.client.plot import handle
from tests.support.client.plotted import attempt, telemetry
from tests.support.golden import golden
from tests.support.paths import REPOSITORY


def test_the_caller_s_style_changes_nothing(tmp_path: Path) -> None:
    directory = attempt(tmp_path / "r", 1, [telemetry(5)])
    code = f"""
import matplotlib
matplotlib.rcParams.update({{"text.color": "white", "figure.facecolor": "black", "savefig.facecolor": "black"}})
matplotlib.rcParams.update({{"axes.titlecolor": "white", "savefig.transparent": False, "axes.facecolor": "black"}})
from pathlib import Path
from tests.support.client.plot import handle
import sys
figure = handle(Path({str(directory)!r})).plot({str(tmp_path / "styled.png")!r})
assert "matplotlib.pyplot" not in sys.modules
print(figure.axes[0].title.get_color(), figure.axes[0]._left_title.get_color(), figure.get_facecolor()[0])
"""
    root = REPOSITORY
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1:] == ["#1f2328", "1.0"]
    handle(directory).plot(tmp_path / "plain.png")
    assert (tmp_path / "styled.png").read_bytes() == (tmp_path / "plain.png").read_bytes()


def test_without_matplotlib_there_is_one_sentence(tmp_path: Path) -> None:
    directory = attempt(tmp_path / "r", 1, [telemetry(5)])
    code = f"""
import sys
from pathlib import Path
sys.modules["matplotlib"] = None
from serverless_gpu import Run
from serverless_gpu.client.runs.run_source import LocalRun
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.spec import RunSpec
run = Run(LocalRun("r", Path({str(directory)!r}), 1, None), RunSpec())
run._nothing_more()
assert run.metrics()
try:
    run.plot()
except ServerlessGpuError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "needs" not in done.stderr and done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        golden("client.plot.run-plot-draws"),
        golden("client.plot.hint-pip-install"),
    ]
