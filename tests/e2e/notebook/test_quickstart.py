"""The quickstart notebook as a stranger runs it: every cell, from top to bottom, on two CPU slots."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support.golden import golden
from tests.support.notebook.kernel import Shown, started
from tests.support.paths import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def notebook() -> Any:
    """Return the notebook as it is stored."""
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_stored_valid_and_without_outputs(notebook: Any) -> None:
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert "widgets" not in notebook.metadata


def test_every_cell_does_what_the_text_says(notebook: Any, at_home: Path) -> None:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    with started(NOTEBOOK.parent, SERVERLESS_GPU_HOME=str(at_home)) as kernel:
        shown: dict[str, Shown] = {}
        for cell in cells:
            answer = shown[cell.source] = kernel.run(cell.source)
            may_fail = "raises-exception" in cell.metadata.get("tags", [])
            assert (answer.error[0] != "") is may_fail, (cell.source, answer.traceback)

    def of(part: str) -> Shown:
        return next(answer for source, answer in shown.items() if part in source)

    assert of("hello.distributed").result == golden("notebook.quickstart.demo-rank-demo")
    assert "<table" in of("hello.distributed").displayed("text/html")[-1], "the receipt is below the output"
    assert of("score_my_share").result == "10"
    assert sorted(of("score_my_share").text().splitlines()) == ["[rank 0] scored 5 texts", "[rank 1] scored 5 texts"]
    assert of("fail.distributed").error[0] == "LookupError"
    assert of("-o lengths").result == "[30, 30]"
    assert of("sum(lengths)").result == "60"
    assert of("run.results()").result == str([f"in the background: rank {rank} of 2" for rank in (0, 1)])
    assert "SUCCEEDED" in of("run.receipt()").result
    if importlib.util.find_spec("torch") is not None:
        assert golden("notebook.quickstart.all-ranks-same") in of("import torch").text()
