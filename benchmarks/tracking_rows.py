"""What tracking and telemetry cost: a call with them beside one without, and the monitor that samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.contestants import ContestantFailed
from benchmarks.report import Row, Timing
from benchmarks.stage import Stage

TRACKING_RATIO_MAX = 1.25
MONITOR_CPU_MS_MAX = 20.0
_ROUND_S_MAX = 120.0  # the first one starts MLflow's server


def tracking(quick: bool) -> Row:
    """The warm row with tracking, beside the same call with `tracking=False`, by one process in turns."""
    python = Path(sys.prefix, "mlflow", "bin", "python")
    if not python.exists():
        raise ContestantFailed(f"there is no {python}: `make .venv/.installed-mlflow` makes it")
    names = ("tracked.on_and_off", "tracked.watched")
    with Stage(names, (), round_s_max=_ROUND_S_MAX, python=str(python)) as stage:
        stage.play(3 if quick else 16, slow=("tracked.watched",))
        on = stage.timing(0, "call → process group ready, tracked by the home's MLflow server")
        off = stage.timing(0, "the same with tracking=False", "off_ms")
        cpu = stage.timing(1, "monitor: CPU for each second in which it samples 8 declared GPUs and their ranks")
        memory = stage.timing(1, "", "mb")
        ratio = on.median / off.median
        return Row(
            name="tracking: the warm row with tracking on",
            ours=on,
            against=(off,),
            bar=f"≤ {TRACKING_RATIO_MAX:g}×; monitor ≤ {MONITOR_CPU_MS_MAX / 10:g} % of a core",
            met=ratio <= TRACKING_RATIO_MAX and cpu.median <= MONITOR_CPU_MS_MAX,
            value=f"monitor {cpu.median / 10:.1f} %",
            also=(cpu, Timing("monitor: its memory", memory.values, "mb")),
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {"tracking": tracking}
