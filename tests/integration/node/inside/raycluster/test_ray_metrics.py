"""Ray's metrics on their way into a file: the text's reader, the request, and the process that asks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from serverless_gpu.node.inside.raycluster import metrics
from tests.support.local.observe import LIMIT_S, wait_for
from tests.support.node.ray_agents import agent, answer
from tests.support.node.ray_monitor import KNOWN, TEXT


def test_a_text_that_comes_in_pieces_is_read_like_a_whole_one() -> None:
    whole = answer(TEXT, f"Content-Length: {len(TEXT)}")
    with agent(*[whole[at : at + 777] for at in range(0, len(whole), 777)]) as ray:
        assert metrics.scrape("127.0.0.1", ray.port) == KNOWN
    assert ray.asked[0].startswith(b"GET /metrics HTTP/1.0\r\n")


def test_no_proxy_of_the_environment_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(answer(TEXT)) as ray, agent(answer(b"ray_node_mem_used 1\n")) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert metrics.scrape("127.0.0.1", ray.port) == KNOWN
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
        assert metrics.scrape("127.0.0.1", ray.port) == {}


def test_a_line_longer_than_any_is_left_out() -> None:
    long = b'ray_tasks{State="RUNNING",Name="' + b"n" * 200_000 + b'"} 9\n'
    with agent(answer(long + b"ray_node_mem_used 1\n" + long)) as ray:
        assert metrics.scrape("127.0.0.1", ray.port) == {"memory_bytes": 1.0}


def test_a_text_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "BODY_BYTES_MAX", 1000)
    with agent(answer(TEXT)) as ray:
        assert metrics.scrape("127.0.0.1", ray.port) == {}


@pytest.mark.parametrize("said", [b"", answer(b"ray_node_mem_used 1\n")[:25], answer(b"ray_node_mem_used 1\n")])
def test_one_that_hangs_is_left(said: bytes) -> None:
    with agent(said, hang=True) as ray:
        assert metrics.scrape("127.0.0.1", ray.port, 0.1) == {}


def test_one_that_is_not_there_says_nothing() -> None:
    with agent() as ray:
        port = ray.port
    assert metrics.scrape("127.0.0.1", port) == {}


@contextlib.contextmanager
def running(port: int, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    program = (
        "import sys; from serverless_gpu.node.inside.raycluster import metrics; "
        "metrics.run('127.0.0.1', int(sys.argv[1]), sys.argv[2], every_s=0.02)"
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
