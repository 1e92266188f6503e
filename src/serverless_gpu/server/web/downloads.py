"""Answers with files that a browser saves: CSV, JSON lines and Parquet.

A downloaded file never opens in the page. In CSV files, text that begins with a formula character gets a leading
apostrophe. Spreadsheets therefore do not run the text.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.responses import Response, StreamingResponse

from serverless_gpu.errors import NotFound
from serverless_gpu.model.billing.usage_table import UsageTable, arrow_schema
from serverless_gpu.server.http.routing import Call

CSV = "text/csv; charset=utf-8"
JSON_LINES = "application/jsonl; charset=utf-8"
PARQUET = "application/vnd.apache.parquet"
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_AT_ONCE = 500


class Download(msgspec.Struct, frozen=True, kw_only=True):
    """A file for a browser to save.

    Attributes:
        name: suggested file name.
        media_type: type of the content.
        content: bytes, or an iterator that yields the bytes in pieces.
    """

    name: str
    media_type: str
    content: Any

    def response(self, call: Call) -> Response:
        """Return the file as an attachment."""
        plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in self.name)[:120]
        disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(self.name[:120], safe='')}"
        headers = {
            "Content-Disposition": disposition,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        if isinstance(self.content, bytes):
            return Response(self.content, headers=headers, media_type=self.media_type)
        return StreamingResponse(self.content, headers=headers, media_type=self.media_type)


def csv_pieces(names: Sequence[str], lines: Iterable[Sequence[Any]]) -> Iterator[bytes]:
    """Yield a CSV file in pieces, with text cells that no spreadsheet runs as a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    for number, line in enumerate(lines, 1):
        writer.writerow([csv_cell(cell) for cell in line])
        if number % _AT_ONCE == 0:
            yield _taken(text)
    yield _taken(text)


def csv_cell(value: Any) -> Any:
    """Return a cell for a CSV file. Numbers stay numbers, and None is an empty cell."""
    if value is None:
        return ""
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def has_parquet() -> bool:
    """Return True if the server can write Parquet."""
    return importlib.util.find_spec("pyarrow") is not None


def parquet(table: UsageTable) -> bytes:
    """Return a usage report as a Parquet file with exact decimals."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise NotFound(
            "Parquet needs PyArrow, which is not installed on the server",
            hint="run pip install 'serverless-gpu[simulate]' on the server, or download CSV",
        ) from None
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table.rows(), schema=arrow_schema(pyarrow, table)), sink)
    return sink.getvalue()


def _taken(text: io.StringIO) -> bytes:
    data = text.getvalue().encode("utf-8", "replace")
    text.seek(0)
    text.truncate()
    return data
