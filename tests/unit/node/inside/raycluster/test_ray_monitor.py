"""Ray's metrics on their way into a file: the text's reader, the request, and the process that asks."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.model.ray_telemetry import RaySample
from serverless_gpu.node.inside.raycluster import monitor
from serverless_gpu.node.inside.raycluster.figures import FIGURES, Figures
from tests.support.local.observe import LIMIT_S, wait_for
from tests.support.node.ray_agents import RECORDED, agent, answer

TEXT = RECORDED.read_bytes()
KNOWN = {
    "cpus": 3.0,
    "cpus_used": 3.0,
    "gpus": 2.0,
    "gpus_used": 1.0,
    "object_store_bytes": 93000012.0,
    "object_store_free_bytes": 6999988.0,
    "objects": 4.0,
    "spilled_bytes": 210000051.0,
    "tasks_pending": 2.0,
    "tasks_running": 1.0,
    "tasks_finished": 14.0,
    "tasks_failed": 1.0,
    "tasks_infeasible": 0.0,
    "actors": 1.0,
    "actors_pending": 0.0,
    "placement_groups": 1.0,
    "placement_groups_pending": 0.0,
    "workers": 4.0,
    "cpu_percent": 50.9,
    "memory_bytes": 1394958336.0,
    "memory_total_bytes": 25276502016.0,
}


def figures(text: str) -> dict[str, float]:
    read = Figures()
    for line in text.encode().split(b"\n"):
        read.add(line)
    return read.result()


# --- the text ---


def test_the_figures_of_a_real_text() -> None:
    assert figures(TEXT.decode()) == KNOWN


def test_every_figure_has_a_value_in_samples_and_nothing_else_has() -> None:
    assert sorted(FIGURES) == sorted(RaySample.__struct_fields__)


def test_labels_hold_whatever_users_write() -> None:
    hostile = r"a}b, State=\"FAILED\",c\\"
    text = f'ray_tasks{{Name="{hostile}",State="RUNNING",Source="executor",}} 2.0 1795330261000\n'
    assert figures(text) == {"tasks_running": 2.0}


def test_a_task_that_is_called_like_another_metric_is_not_one() -> None:
    assert figures('ray_tasks{Name="ray_node_mem_used 5",State="FINISHED"} 1') == {"tasks_finished": 1.0}
    assert figures('my_metric{Name="ray_node_mem_used"} 5\nray_node_mem_used_host{ip="1"} 5') == {}


def test_what_a_process_took_away_with_it_leaves_no_count_below_nothing() -> None:
    text = 'ray_tasks{State="RUNNING",Name="f"} 1\nray_tasks{State="RUNNING_IN_RAY_GET",Name="f"} -3'
    assert figures(text) == {"tasks_running": 0.0}


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# HELP ray_node_mem_used memory",
        "ray_node_mem_used",
        "ray_node_mem_used ",
        "ray_node_mem_used NaN",
        "ray_node_mem_used +Inf",
        "ray_node_mem_used five",
        'ray_node_mem_used{ip="1',
        'ray_node_mem_used{ip="1" 5',
        "ray_node_mem_used{ip=1} 5",
        'ray_node_mem_used{ip="1"}',
        '{ip="1"} 5',
        "\x00\xff",
    ],
)
def test_a_line_that_is_no_metric_is_left_out(line: str) -> None:
    assert figures(line + "\nray_node_mem_total 7") == {"memory_total_bytes": 7.0}


def test_custom_resources_and_those_of_placement_groups_are_no_cpus() -> None:
    text = 'ray_resources{Name="CPU_group_0_ab",State="USED"} 1\n'
    text += 'ray_resources{Name="accelerator_type:H100",State="USED"} 1'
    assert figures(text) == {}


def test_names_of_older_rays_count_likewise() -> None:
    text = (
        'ray_actors{Name="A",Source="gcs",State="ALIVE"} 2\nray_actors{Name="A",Source="executor",State="ALIVE"} -2\n'
        'ray_actors{Name="A",Source="executor",State="IDLE"} 1\n'
        'ray_actors{Name="A",Source="executor",State="RUNNING_IN_RAY_GET"} 1'
    )
    assert figures(text) == {"actors": 2.0}


# --- the request ---


def test_a_text_that_comes_in_pieces_is_read_like_a_whole_one() -> None:
    whole = answer(TEXT, f"Content-Length: {len(TEXT)}")
    with agent(*[whole[at : at + 777] for at in range(0, len(whole), 777)]) as ray:
        assert monitor.scrape("127.0.0.1", ray.port) == KNOWN
    assert ray.asked[0].startswith(b"GET /metrics HTTP/1.0\r\n")


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(answer(TEXT)) as ray, agent(answer(b"ray_node_mem_used 1\n")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert monitor.scrape("127.0.0.1", ray.port) == KNOWN
        assert proxy.asked == []


@pytest.mark.parametrize(
    "whole",
    [
        b"",
        b"HTTP/1.0",
        b"SSH-2.0-OpenSSH\r\n\r\nray_node_mem_used 1\n",
        b"HTTP/1.0 200 OK\r\nContent-Length: many\r\n\r\nray_node_mem_used 1\n",
        b"x" * 200_000,
        answer(TEXT, status="500 Internal Server Error"),
        answer(b"", "Location: http://127.0.0.1/", status="302 Found"),
        answer(TEXT, "Transfer-Encoding: chunked"),
        answer(TEXT[:5000]),
        answer(TEXT, f"Content-Length: {len(TEXT) + 1}"),
        answer(TEXT + b"y" * 200_000),
    ],
    ids=[
        "nothing", "half a head", "not HTTP", "no length", "no head", "failed", "elsewhere", "chunks", "cut off",
        "shorter than said", "no last line",
    ],
)  # fmt: skip
def test_an_answer_that_is_not_whole_says_nothing(whole: bytes) -> None:
    with agent(whole) as ray:
        assert monitor.scrape("127.0.0.1", ray.port) == {}


def test_a_line_longer_than_any_is_left_out() -> None:
    long = b'ray_tasks{State="RUNNING",Name="' + b"n" * 200_000 + b'"} 9\n'
    with agent(answer(long + b"ray_node_mem_used 1\n" + long)) as ray:
        assert monitor.scrape("127.0.0.1", ray.port) == {"memory_bytes": 1.0}


def test_a_text_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "_BODY_BYTES_MAX", 1000)
    with agent(answer(TEXT)) as ray:
        assert monitor.scrape("127.0.0.1", ray.port) == {}


@pytest.mark.parametrize("said", [b"", answer(b"ray_node_mem_used 1\n")[:25], answer(b"ray_node_mem_used 1\n")])
def test_one_that_hangs_is_left(said: bytes) -> None:
    with agent(said, hang=True) as ray:
        assert monitor.scrape("127.0.0.1", ray.port, 0.1) == {}


def test_one_that_is_not_there_says_nothing() -> None:
    with agent() as ray:
        port = ray.port
    assert monitor.scrape("127.0.0.1", port) == {}


# --- the process ---


@contextlib.contextmanager
def running(port: int, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = (
        "import sys; from serverless_gpu.node.inside.raycluster import monitor; "
        "monitor.run('127.0.0.1', int(sys.argv[1]), sys.argv[2], every_s=0.02)"
    )
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program, str(port), str(path)], pass_fds=[writing])
    os.close(writing)
    try:
        assert select.select([reading], [], [], LIMIT_S)[0] == [reading], "it keeps nothing of its parent open"
        yield process
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def written(path: Path) -> dict[str, float]:
    try:
        figures: dict[str, float] = json.loads(path.read_bytes())["figures"]
    except FileNotFoundError:
        return {}
    return figures


def test_the_file_has_the_latest_figures_and_outlives_a_ray_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "1" / "ray" / "0.metrics.json"
    with agent(answer(TEXT)) as ray, running(ray.port, path) as process:
        wait_for(lambda: written(path) == KNOWN, "all figures are there")
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        ray.pieces = (answer(b"ray_node_mem_used 1\n"),)
        wait_for(lambda: written(path) == {"memory_bytes": 1.0}, "the new figures")
        ray.pieces = (answer(b"", status="503 Gone"),)
        asked = len(ray.asked)
        wait_for(lambda: len(ray.asked) > asked + 3, "it asks on")
        assert written(path) == {"memory_bytes": 1.0}
        assert process.poll() is None


def test_it_waits_for_a_ray_that_is_not_there_yet_and_ends_by_sigterm(tmp_path: Path) -> None:
    path = tmp_path / "0.metrics.json"
    with agent(b"") as ray, running(ray.port, path) as process:
        wait_for(lambda: len(ray.asked) > 2, "it asks")
        assert not path.exists()
        process.send_signal(signal.SIGINT)  # for the driver
        ray.pieces = (answer(TEXT),)
        wait_for(path.exists, "the figures")
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("in the way")
    with agent(answer(TEXT)) as ray, running(ray.port, tmp_path / "ray" / "0.metrics.json") as process:
        wait_for(lambda: len(ray.asked) > 3, "it asks on")
        assert process.poll() is None
        (tmp_path / "ray").unlink()
        wait_for((tmp_path / "ray" / "0.metrics.json").exists, "the figures")


def test_an_environment_whose_ray_has_no_metrics_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"grpc"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else object())
    sentence = "Ray's own metrics are not recorded: grpc is missing (pip install 'ray[default]')"
    assert monitor.missing() == sentence
    absent.clear()
    assert monitor.missing() == ""


def test_a_module_that_does_not_know_where_it_is_from_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiohttp", "aiohttp_cors", "grpc", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert monitor.missing() == ""


def test_a_process_that_only_stays_holds_nothing_open(tmp_path: Path) -> None:
    code = f"""
import os
from serverless_gpu.node.inside import linux
kept = os.open("/", os.O_RDONLY)
linux.leave_descriptors()
open({str(tmp_path / "there")!r}, "w").write(" ".join(sorted(os.readlink(f"/proc/self/fd/{{fd}}") for fd in range(3))))
try:
    os.fstat(kept)
except OSError:
    os.mkdir({str(tmp_path / "closed")!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (tmp_path / "there").read_text().split() == [os.devnull] * 3
    assert (tmp_path / "closed").exists(), done.stderr
