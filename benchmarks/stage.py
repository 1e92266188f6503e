"""A fresh home and the contestants of one row, who take turns; everything ends with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contestants import ROUND_S_MAX, Contestant, ContestantFailed, interleave
from benchmarks.report import Timing
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.mlflow_server.server import stop_servers
from serverless_gpu.testing import stop_agent


class Stage:
    """A fresh home and the contestants of one row; everything ends with it.

    Args:
        names: contestants, ours first.
        labels: what the table calls the neighbours.
        round_s_max: how long a round may take.
        python: the interpreter of the contestants; "" for this one.
    """

    def __init__(
        self, names: Sequence[str], labels: Sequence[str], *, round_s_max: float = ROUND_S_MAX, python: str = ""
    ) -> None:
        self._names = names
        self._labels = labels
        self._round_s_max = round_s_max
        self._python = python
        self._directory = Path(tempfile.mkdtemp(prefix="sgpu-bench-"))
        self._contestants: list[Contestant] = []

    def __enter__(self) -> Stage:
        home = self._directory / "home"
        home.mkdir(mode=0o700)
        self._contestants = [
            Contestant(name, self._directory, home, round_s_max=self._round_s_max, python=self._python)
            for name in self._names
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for contestant in self._contestants:
            contestant.close()
        stop_agent(self._directory / "home")
        stop_servers(Home(self._directory / "home"))
        shutil.rmtree(self._directory, ignore_errors=True)

    def play(self, rounds: int, *, slow: Sequence[str] = (), pause_s: float = 0.5) -> None:
        interleave(self._contestants, rounds, slow=slow, pause_s=pause_s)

    def timing(self, index: int, label: str, key: str = "ms") -> Timing:
        """Return one contestant's times.

        Raises:
            ContestantFailed: it has none.
        """
        contestant = self._contestants[index]
        if not contestant.samples:
            raise ContestantFailed("; ".join(contestant.problems()) or f"{contestant.name}: no rounds")
        return Timing(label, tuple(sample[key] for sample in contestant.samples), key if key == "mb" else "ms")

    def against(self, key: str = "ms") -> tuple[Timing, ...]:
        """Return the neighbours that could be measured."""
        numbered = enumerate(self._labels, start=1)
        return tuple(self.timing(index, label, key) for index, label in numbered if self._contestants[index].samples)

    def problems(self) -> tuple[str, ...]:
        return tuple(problem for contestant in self._contestants for problem in contestant.problems())
