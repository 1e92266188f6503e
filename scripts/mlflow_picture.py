"""The picture of MLflow's page in the how-to: a run on two nodes, in a real server, by a real browser.

    simulated gang ──delivery──▶ mlflow server ◀──page── Chromium, headless ──▶ docs/images/mlflow.png

Run as `python -m scripts.mlflow_picture`; nothing else needs it, and no test compares it. It needs `.venv/mlflow`
(`make .venv/.installed-mlflow`), Chromium (Debian's package `chromium`) and `pip install playwright`, which drives it.
Failure cases: one of them is not there, or the page is not drawn in time; then there is no new picture.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from tests.e2e.tracking.two_nodes import run_on_two_nodes
from tests.support.tracking.mlflow_server import PYTHON, MlflowServer

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "mlflow.png"
EXPERIMENT = "/Users/ada/digits"
SHOWN = "gpu_[0-2]_util"
# It talks to nobody but the page.
OPTIONS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


def _draw(page: Page, address: str) -> None:
    """Show some of the charts of both nodes, and keep what a person would see."""
    page.goto(address)
    page.get_by_role("button", name="Close").first.click()
    search = page.get_by_placeholder("Search metric charts")
    search.fill(SHOWN)
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length >= 6", timeout=60_000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(2_000)
    page.screenshot(path=PICTURE)


def main() -> None:
    """Make the picture."""
    browser = shutil.which("chromium")
    if browser is None or not PYTHON.exists():
        sys.exit(
            "error: Chromium or .venv/mlflow is missing\nhint: apt-get install chromium; make .venv/.installed-mlflow"
        )
    with tempfile.TemporaryDirectory(prefix="sg-picture-") as name:
        server = MlflowServer(Path(name))
        server.start()
        try:
            run_on_two_nodes(Path(name), server.uri, EXPERIMENT)
            (run,) = server.runs(EXPERIMENT)
            page = f"{server.uri}/#/experiments/{run.experiment_id}/runs/{run.run_id}/system-metrics"
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(executable_path=browser, args=OPTIONS)
                _draw(chromium.new_page(viewport={"width": 1280, "height": 980}), page)
                chromium.close()
        finally:
            server.stop()
    print(PICTURE)


if __name__ == "__main__":
    main()
