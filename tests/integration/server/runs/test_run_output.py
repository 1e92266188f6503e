"""The output and telemetry of a run over the API: sizes, search, download, charts; for those who may see the run."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue, NotFound
from serverless_gpu.server.runs import log_search
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.wire.connection import Connection
from serverless_gpu.wire.runs import LogList, LogMatch, LogMatches, TelemetryView
from tests.support.server.served import Served, served
from tests.support.web.browser import make_user
from tests.support.web.output import OutputRun


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def run(server: Served) -> Iterator[OutputRun]:
    with OutputRun(server, ranks=2) as running:
        yield running


def search(connection: Connection, run: OutputRun, q: str, **query: str) -> LogMatches:
    path = f"/runs/{run.id}/log-matches"
    return connection.ask("GET", path, query={"q": q, **query}, answer=LogMatches)


def search_all(connection: Connection, run: OutputRun, q: str, **query: str) -> list[LogMatch]:
    found: list[LogMatch] = []
    cursor = ""
    while True:
        part = search(connection, run, q, cursor=cursor, **query)
        found += part.matches
        cursor = part.cursor
        if not cursor:
            return found


def test_streams_are_listed_with_output_before_errors(server: Served, run: OutputRun) -> None:
    run.write(b"error\n", stream="stderr")
    run.write(b"out\n")
    run.write(b"other\n", rank=1)
    run.measure(5)
    found = server.connection().ask("GET", f"/runs/{run.id}/logs", answer=LogList)
    assert [(log.rank, log.stream, log.size) for log in found.logs[:2]] == [(0, "stdout", 4), (0, "stderr", 6)]
    assert (found.fence, found.complete, found.count) == (1, False, 4)
    one = server.connection().ask("GET", f"/runs/{run.id}/logs", query={"rank": "1"}, answer=LogList)
    assert [(log.rank, log.stream) for log in one.logs] == [(1, "stdout")]
    run.end()
    assert server.connection().ask("GET", f"/runs/{run.id}/logs", answer=LogList).complete


def test_a_search_finds_lines_with_numbers_offsets_and_context(server: Served, run: OutputRun) -> None:
    output = b"first\n\x1b[31mThe Loss\x1b[0m is <b>nan</b>\nlast\nloss again"
    run.write(output)
    run.write("größer: loss\n".encode(), rank=1, stream="stderr")
    found = search(server.connection(), run, "LOSS").matches
    assert [(m.rank, m.stream, m.line, m.offset) for m in found] == [
        (0, "stdout", 2, 6),
        (0, "stdout", 4, output.index(b"loss again")),
        (1, "stderr", 1, 0),
    ]
    first = found[0]
    assert (first.before, first.after) == ("first", "last")
    assert first.text.startswith("The Loss")
    assert first.text.endswith("<b>nan</b>")
    assert first.text[first.start : first.end] == "Loss"
    assert [m.rank for m in search(server.connection(), run, "loss", rank="1").matches] == [1]
    assert search(server.connection(), run, "loss", stream="stderr").matches[0].text == "größer: loss"
    assert search(server.connection(), run, "GRÖSSE").matches == ()
    assert search(server.connection(), run, ".*").matches == ()  # Plain text.


def test_a_search_is_divided_into_parts_that_together_find_everything(
    server: Served, run: OutputRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(log_search, "SEARCH_BYTES_MAX", 5_000)
    lines = [b"needle %d" % n if n % 7 == 0 else b"line %d" % n for n in range(3_000)]
    run.write(b"\n".join(lines) + b"\n")
    run.write(b"needle", rank=1)
    found = search_all(server.connection(), run, "needle", limit="50")
    expected = [n + 1 for n in range(3_000) if n % 7 == 0]
    assert [m.line for m in found if m.rank == 0] == expected
    offsets = [sum(len(line) + 1 for line in lines[: n - 1]) for n in expected]
    assert [m.offset for m in found if m.rank == 0] == offsets
    assert [m.line for m in found if m.rank == 1] == [1]
    part = search(server.connection(), run, "absent")
    assert part.cursor and part.scanned <= 6_000


def test_a_search_finds_a_text_at_any_place_of_a_very_long_line(
    server: Served, run: OutputRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_search, "CHUNK_BYTES", 64)
    for place in range(50, 80):
        run.write(b"x" * place + b"needle" + b"y" * 100 + b"\n")
    found = search_all(server.connection(), run, "needle")
    assert sorted({m.line for m in found}) == list(range(1, 31))


def test_an_invalid_search_is_refused(server: Served, run: OutputRun) -> None:
    texts = ({"q": ""}, {"q": "a\nb"}, {"q": "x" * 201})
    for query in (*texts, {"q": "x", "cursor": "0.stdout.-1.0"}, {"q": "x", "limit": "0"}):
        with pytest.raises(InvalidValue):
            server.connection().ask("GET", f"/runs/{run.id}/log-matches", query=query, answer=LogMatches)


def test_a_download_is_the_whole_stream_as_a_gzip_file(server: Served, run: OutputRun) -> None:
    data = b"".join(b"line %d\n" % n for n in range(200_000))
    run.write(data)
    packed, headers = server.connection().fetch(f"/runs/{run.id}/logs/0/stdout/download")
    assert gzip.decompress(packed) == data
    assert headers["Content-Disposition"] == f'attachment; filename="{run.id}-1-0-stdout.log.gz"'
    assert headers["X-Content-Type-Options"] == "nosniff"
    with pytest.raises(NotFound):
        server.connection().get(f"/runs/{run.id}/logs/7/stdout/download")
    with pytest.raises(InvalidValue):
        server.connection().get(f"/runs/{run.id}/logs/0/passwd/download")


def test_a_download_ends_where_retention_has_deleted_the_output(
    server: Served, run: OutputRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.write(b"x" * 600_000)
    read = Logs.read

    def deleted(self: Logs, *arguments: Any, offset: int = 0, **named: Any) -> bytes:
        return b"" if offset else read(self, *arguments, offset=offset, **named)

    monkeypatch.setattr(Logs, "read", deleted)
    packed = server.connection().get(f"/runs/{run.id}/logs/0/stdout/download")
    assert 0 < len(gzip.decompress(packed)) < 600_000


def test_telemetry_is_charts_during_the_run_and_long_after_it(server: Served, run: OutputRun) -> None:
    def view(**query: str) -> TelemetryView:
        return server.connection().ask("GET", f"/runs/{run.id}/telemetry", query=query, answer=TelemetryView)

    assert (view().fence, view().charts, view().complete) == (1, (), False)
    run.measure(600)
    found = view(buckets="100")
    assert (found.nodes, found.samples, found.complete) == ((0,), 600, False)
    assert [chart.name for chart in found.charts][:2] == ["gpu-use", "gpu-memory"]
    assert 99.0 in found.charts[0].lines[0].maximum
    run.end()
    assert view(buckets="100") == msgspec.structs.replace(found, complete=True)
    assert view(node="3").charts == ()
    with pytest.raises(InvalidValue):
        view(from_ms="9", to_ms="3")
    with pytest.raises(InvalidValue):
        view(buckets="1001")


def test_output_of_another_users_run_does_not_exist(server: Served) -> None:
    run = OutputRun(server, token=make_user(server, "ann"))
    run.write(b"secret\n")
    run.end()
    eve = server.connection(make_user(server, "eve"))
    for path in ("/logs", "/logs/0/stdout/download", "/log-matches", "/telemetry"):
        for fence in ("0", "1"):
            query = {"fence": fence, **({"q": "secret"} if path == "/log-matches" else {})}
            with pytest.raises(NotFound):
                eve.get(f"/runs/{run.id}{path}", query=query)
