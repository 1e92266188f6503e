"""`Run.metrics()` and `Run.plot()`: what is read of a run's directories, and what the picture says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from serverless_gpu.errors import InvalidValue, StorageError
from serverless_gpu.model.hardware import DeviceKind
from tests.support.client.plot import handle
from tests.support.client.plotted import ORIGIN_NS, attempt, telemetry
from tests.support.golden import golden

BUSY = "system/node_0/gpu_1_utilization_percentage"


def words(figure: Figure) -> str:
    """Return all text of a picture."""
    texts = [text.get_text() for text in figure.texts]
    for panel in figure.axes:
        texts += [panel.get_title(loc="left"), panel.get_xlabel(), *(text.get_text() for text in panel.texts)]
        texts += [label.get_text() for label in panel.get_yticklabels()]
    return "\n".join(texts)


def failures(figure: Figure) -> list[float]:
    """Return where lines of the colour of failures are."""
    lines = [line for panel in figure.axes for line in panel.lines if to_rgba(line.get_color()) == to_rgba("#c62828")]
    return sorted({round(float(line.get_xdata()[0]), 3) for line in lines})  # type: ignore[index,arg-type]  # its stubs


def drawn(figure: Figure) -> bool:
    """Draw the picture; whether no text of the figure itself reaches out of it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]  # Matplotlib has no type for it
    width, height = canvas.get_width_height()
    boxes = [text.get_window_extent() for text in [*figure.texts, *(t for panel in figure.axes for t in panel.texts)]]
    return all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in boxes)


def test_metrics_are_those_of_all_attempts_and_nodes(tmp_path: Path) -> None:
    attempt(tmp_path / "r", 1, [telemetry(3, gpus=2), telemetry(2, node_rank=1)])
    last = attempt(tmp_path / "r", 2, [telemetry(4, fence=2, gpus=2, start_s=60)])
    metrics = handle(last).metrics()
    series = metrics[BUSY]
    assert [round(at - ORIGIN_NS / 1e9, 3) for at in series.times] == [0, 1, 2, 60, 61, 62, 63]
    assert series.values == [15.0] * 7
    assert len(metrics["system/node_1/gpu_0_utilization_percentage"].times) == 2


def test_metrics_of_a_run_that_was_not_sampled_are_none(tmp_path: Path) -> None:
    assert handle(attempt(tmp_path / "r", 1, [])).metrics() == {}


@pytest.mark.parametrize(("gpus", "panels"), [(1, 2), (2, 4), (8, 16), (9, 4), (64, 4)])
def test_the_picture_has_a_place_for_every_gpu(tmp_path: Path, gpus: int, panels: int) -> None:
    figure = handle(attempt(tmp_path / "r", 1, [telemetry(30, gpus=gpus)])).plot()
    assert len(figure.axes) == panels, "beside those of heat maps stand the bars of their colours"
    assert golden("client.plot.h100-29-succeeded", gpus=gpus) in words(figure)
    assert "GPU utilisation, %" in words(figure) and "GPU memory, GiB" in words(figure)
    assert drawn(figure)


def test_failures_and_attempts_are_marked_where_they_were(tmp_path: Path) -> None:
    attempt(tmp_path / "r", 1, [telemetry(60, gpus=2)], failed_s=58.5)
    last = attempt(tmp_path / "r", 2, [telemetry(60, fence=2, gpus=2, start_s=100)], began_s=99, failed_s=159)
    figure = handle(last).plot()
    assert failures(figure) == [58.5, 159.0]
    text = words(figure)
    assert golden("client.plot.failed-rank-raised") in text
    assert golden("client.plot.attempt-began-after") in text or golden("client.plot.attempt-began-after-99") in text
    assert golden("client.plot.h100-min-39") in text
    assert drawn(figure)


def test_letters_of_marks_at_the_same_moment_stand_beside_each_other(tmp_path: Path) -> None:
    directory = attempt(tmp_path / "r", 1, [telemetry(60, gpus=2)], failed_s=58.5)
    (directory / "stop_reason").write_text("failure", encoding="ascii")
    os.utime(directory / "stop_reason", ns=(0, ORIGIN_NS + round(58.6e9)))
    figure = handle(directory).plot()
    drawn(figure)
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text() in ("A", "B")]
    assert len(boxes) == 2 and boxes[0].x1 <= boxes[1].x0


def test_a_stop_is_marked(tmp_path: Path) -> None:
    directory = attempt(tmp_path / "r", 1, [telemetry(60, gpus=2)], asked="preempt")
    os.utime(directory / "stop_reason", ns=(0, ORIGIN_NS + 50 * 10**9))
    assert golden("client.plot.asked-stop-preempt") in words(handle(directory).plot())


def test_slots_of_a_cpu_are_shown_as_ranks(tmp_path: Path) -> None:
    figure = handle(attempt(tmp_path / "r", 1, [telemetry(5, gpus=2, kind=DeviceKind.CPU)])).plot()
    assert golden("client.plot.share-core") in words(figure) and "host memory, GB" in words(figure)
    assert "2 CPU slots" in words(figure) and "rank 1" in words(figure) and "mean 97 %" in words(figure)


def test_little_is_said_to_be_little(tmp_path: Path) -> None:
    assert golden("client.plot.too-short-curve") in words(handle(attempt(tmp_path / "a", 1, [telemetry(2)])).plot())
    assert golden("client.plot.nothing-sampled-run") in words(handle(attempt(tmp_path / "b", 1, [])).plot())
    assert "too short" not in words(handle(attempt(tmp_path / "c", 1, [telemetry(3)])).plot())


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    run = handle(attempt(tmp_path / "r", 1, [telemetry(5)]), name="a $\\nope{$ \x1b[31m\nb")
    figure = run.plot()
    assert drawn(figure), "nothing in it is mathematics"
    assert figure.texts[0].get_text() == golden("client.plot.nope-31m-run")


def test_a_notebook_shows_it_and_a_file_gets_it(tmp_path: Path) -> None:
    run = handle(attempt(tmp_path / "r", 1, [telemetry(5)]))
    figure = run.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # of our own subclass
    run.plot(str(tmp_path / "p.svg"))
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()


def test_a_file_that_cannot_be_is_refused(tmp_path: Path) -> None:
    run = handle(attempt(tmp_path / "r", 1, [telemetry(5)]))
    with pytest.raises(InvalidValue, match=re.escape(golden("client.plot.format-docx-supported"))):
        run.plot(tmp_path / "p.docx")
    with pytest.raises(StorageError, match=golden("client.plot.picture-cannot-written")) as refused:
        run.plot(tmp_path / "nowhere" / "p.png")
    assert refused.value.hint == golden("client.plot.give-path-file")
