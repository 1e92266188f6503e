"""Draws the how-to page's picture of MLflow: a run on two nodes, in a real server and a real browser.

    simulated gang ──delivery──▶ mlflow server ◀──page── Chromium, headless ──▶ docs/images/mlflow.png

Run it as `python -m scripts.mlflow_picture`. No test compares the picture. The program needs `.venv/mlflow`
(`make .venv/.installed-mlflow`), Chromium (Debian's package `chromium`) and playwright (`pip install playwright`),
which controls Chromium. If one of them is missing, or the page takes too long, the old picture stays.
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
# These options keep the browser from contacting other servers.
OPTIONS = ["--no-sandbox", "--disable-quic", "--disable-background-networking", "--disable-component-update"]


def _draw(page: Page, address: str) -> None:
    """Show some charts of both nodes and save a screenshot."""
    page.goto(address)
    page.get_by_role("button", name="Close").first.click()
    search = page.get_by_placeholder("Search metric charts")
    search.fill(SHOWN)
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot').length >= 6", timeout=60_000)
    page.mouse.move(0, 0)
    page.wait_for_timeout(2_000)
    page.screenshot(path=PICTURE)


def main() -> None:
    """Draw the picture."""
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
