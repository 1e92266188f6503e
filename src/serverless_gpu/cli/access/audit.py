"""`sgpu audit`: lists, copies and verifies a server's audit log.

A copy is a file of JSON lines with one entry on each line. The command verifies a copy whenever it opens the file.

    {"number":1,"seq":1,"at_ns":…,"principal":"ada","action":"run.create","subject":"01m…","detail":{…},"sha256":"…", …}

Failure cases: A killed export leaves an incomplete last line, which the next export removes. A full disk raises OSError
and leaves the earlier lines valid. The command refuses the second of two concurrent exports into one file. A changed
entry raises `AuditBroken`, which names the entry.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
import msgspec

from serverless_gpu.ambient import format_moment
from serverless_gpu.cli.output import json_option, print_json, print_table, say, wide_option
from serverless_gpu.cli.server_connection import server
from serverless_gpu.errors import AuditBroken, InvalidValue
from serverless_gpu.model.audit_chain import ChainedEntry, ChainHead, follow
from serverless_gpu.node.base.private_files import refuse_irregular
from serverless_gpu.node.base.requirements import lock_error
from serverless_gpu.wire.access import AuditPage

if TYPE_CHECKING:
    from serverless_gpu.wire.connection import Connection

PENDING_S = 60.0
"""Maximum age in seconds of an audit entry without a chain link. The server normally chains an entry within two
seconds.
"""
_PAGE = 1000
LINE_BYTES_MAX = 1 << 20
_decode = msgspec.json.Decoder(ChainedEntry).decode


@click.group()
def audit() -> None:
    """List, export and verify the audit log."""


@audit.command("list")
@click.option("--who", default="", metavar="NAME", help="Only entries of this user or service.")
@click.option("--action", default="", help="Only entries with this action, for example token.create.")
@click.option("--subject", default="", help="Only entries about this identifier or name.")
@click.option("--limit", type=click.IntRange(1, _PAGE), default=50, show_default=True, help="Number of latest entries.")
@wide_option
@json_option(tuple[ChainedEntry, ...])
def list_entries(who: str, action: str, subject: str, limit: int, wide: bool, as_json: bool) -> None:
    """List the latest entries."""
    asked = {"principal": who, "action": action, "subject": subject, "limit": str(limit), "newest": "true"}
    with server() as connection:
        found = connection.ask("GET", "/audit", answer=AuditPage, query=asked).entries
    if as_json:
        print_json(found)
        return
    rows = [["TIME", "PRINCIPAL", "ACTION", "SUBJECT", "DETAIL"]]
    for each in found:
        detail = msgspec.json.encode(each.detail).decode() if each.detail else ""
        rows.append([format_moment(each.at_ns), each.principal, each.action, each.subject, detail])
    print_table(rows[0], rows[1:], wide=wide)


@audit.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def export(file: Path) -> None:
    """Copy the audit log into FILE.

    FILE receives one JSON object per line. The command verifies the entries that FILE already has, and appends new
    entries. Run the command regularly on another machine. A person who changes the server's database cannot change the
    copy on the other machine.
    """
    with server() as connection, open_copy(file) as (copy, head):
        before = head
        _refuse_another(connection, head, file)
        for page in _pages(connection, after=head.number):
            head = _check_followed(page.entries, after=head)
            append_entries(copy, page.entries)
    say(f"{head.number - before.number} new entries; {file} ends with {_head_text(head)}")


@audit.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--offline", is_flag=True, help="Verify FILE alone, without the server.")
def verify(file: Path | None, offline: bool) -> None:
    """Verify the chain of the audit log.

    The command reads the server's chain. With FILE, the command also checks that FILE is a part of the chain. After a
    failed check, the command names the first entry that was changed, removed or inserted, and exits with 1.
    """
    if offline:
        if file is None:
            raise click.UsageError("--offline needs a FILE to verify")
        head = check_copy(file)
        say(f"{file} is intact: {_head_text(head)}")
        return
    with server() as connection:
        pages = _pages(connection, after=0)
        first = next(pages)
        links = chain.from_iterable(page.entries for page in chain([first], pages))
        head = _check_followed(
            links if file is None else compare_links(links, read_copy(file), file), after=ChainHead()
        )
    _refuse_stuck(first)
    say(f"the audit log is intact: {_head_text(head)}")


def _pages(connection: Connection, *, after: int) -> Iterator[AuditPage]:
    while True:
        asked = {"after": str(after), "limit": str(_PAGE)}
        page = connection.ask("GET", "/audit", answer=AuditPage, query=asked)
        yield page
        if len(page.entries) < _PAGE:
            return
        after = page.entries[-1].number


def _check_followed(links: Iterable[ChainedEntry], *, after: ChainHead) -> ChainHead:
    head, problem = follow(links, after=after)
    if problem:
        raise AuditBroken(
            f"the server's audit log: {problem}",
            hint="an audit entry in the server's database was changed; a copy made by `sgpu audit export` has the "
            "original entries",
        )
    return head


def compare_links(links: Iterable[ChainedEntry], copied: Iterator[ChainedEntry], file: Path) -> Iterator[ChainedEntry]:
    """Yield the server's entries. Raise AuditBroken if the copy differs or has more entries."""
    known: ChainedEntry | None = None
    for link in links:
        known = next(copied, None)
        if known is not None and known != link:
            fields = " and ".join(
                name for name in ChainedEntry.__struct_fields__ if getattr(known, name) != getattr(link, name)
            )
            both = f"entry {known.number} of {file} is {_entry_text(known)}; the server's entry is {_entry_text(link)}"
            raise AuditBroken(
                f"{both}: they differ in {fields}",
                hint="one of the two entries was changed after the server wrote it; trust a copy that only you "
                "can write to",
            )
        yield link
    known = next(copied, None)
    if known is not None:
        raise AuditBroken(f"{file} has entry {known.number}, {_entry_text(known)}, which the server does not have")


def _refuse_another(connection: Connection, head: ChainHead, file: Path) -> None:
    """Refuse to append to a copy whose last entry differs from the server's entry of that number."""
    if not head.number:
        return
    asked = {"after": str(head.number - 1), "limit": "1"}
    found = connection.ask("GET", "/audit", answer=AuditPage, query=asked).entries
    if not found or (found[0].number, found[0].sha256) != (head.number, head.sha256):
        raise AuditBroken(
            f"{file} ends with {_head_text(head)}, but the server has another entry of that number",
            hint="this is another server, the server was restored from a backup, or its audit log was changed. "
            "Run `sgpu audit verify` for details. Export into a new file and keep the old file",
        )


def _refuse_stuck(page: AuditPage) -> None:
    since_ns = page.pending_since_ns
    if since_ns is not None and page.now_ns - since_ns > PENDING_S * 1e9:
        raise AuditBroken(
            f"{page.pending} entries are not in the chain, the oldest since {format_moment(since_ns)}",
            hint="find the reason in the server's log: `sgpu server logs`",
        )


def _entry_text(link: ChainedEntry) -> str:
    return (
        f"{link.action or 'a removed action'} of {link.principal or 'no principal'} on {link.subject or 'no subject'}"
    )


def _head_text(head: ChainHead) -> str:
    return f"entry {head.number}, {head.sha256[:16]}…" if head.number else "no entry"


def read_copy(path: Path) -> Iterator[ChainedEntry]:
    """Yield the entries of a copy without verification. Raise InvalidValue at a malformed line."""
    with path.open("rb") as file:
        yield from _links(file, path)


def check_copy(path: Path, *, after: ChainHead = ChainHead()) -> ChainHead:  # noqa: B008 - it cannot change
    """Return the number and digest of a copy's last entry. Raise AuditBroken unless the chain is intact."""
    head, problem = follow(read_copy(path), after=after)
    if problem:
        raise AuditBroken(f"{path}: {problem}", hint="compare the file with another copy")
    return head


@contextlib.contextmanager
def open_copy(path: Path) -> Iterator[tuple[IO[bytes], ChainHead]]:
    """Yield a copy under an exclusive lock, with the number and digest of its last entry.

    The function creates a missing file, and raises AuditBroken for a changed copy.
    """
    refuse_irregular(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another process exports into {path}", hint="wait until that export ends, or name another file"
            ) from None
        except OSError as error:
            raise lock_error(path, error.strerror or str(error), is_home=False) from error
        _cut_torn_line(file)
        head = check_copy(path)
        file.seek(0, os.SEEK_END)
        yield file, head


def append_entries(file: IO[bytes], links: Iterable[ChainedEntry]) -> None:
    """Append entries and flush them to the disk, so that a power failure cannot lose them."""
    file.write(b"".join(msgspec.json.encode(link) + b"\n" for link in links))
    file.flush()
    os.fsync(file.fileno())


def _links(file: IO[bytes], path: Path) -> Iterator[ChainedEntry]:
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), start=1):
        if not line.endswith(b"\n"):
            raise InvalidValue(
                f"{path}: line {number} is incomplete or too long",
                hint="`sgpu audit export` removes an incomplete last line",
            )
        try:
            yield _decode(line)
        except msgspec.DecodeError as error:
            raise InvalidValue(f"{path}: line {number} is not an audit entry: {error}") from error


def _cut_torn_line(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - LINE_BYTES_MAX)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1 + start
    if end < size and (end > start or start == 0):
        file.truncate(end)
