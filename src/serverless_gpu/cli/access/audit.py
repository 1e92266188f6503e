"""`sgpu audit`: lists, copies and verifies a server's audit log.

A copy of the audit log is a JSON Lines file with one audit entry per line. `sgpu audit` verifies a copy whenever it
opens the file.

    {"number":1,"seq":1,"at_ns":…,"principal":"ada","action":"run.create","subject":"01m…","detail":{…},"sha256":"…", …}

Failure cases: A killed export leaves an incomplete last line, which the next export removes. A full disk raises OSError
and leaves the earlier lines valid. `sgpu audit export` refuses a file into which another export writes. A
changed audit entry raises `AuditBroken`, which names the entry.
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
"""Maximum age in seconds of an audit entry without a chain link. The server normally links an entry within two seconds.
"""
_PAGE = 1000
LINE_BYTES_MAX = 1 << 20
_decode = msgspec.json.Decoder(ChainedEntry).decode


@click.group()
def audit() -> None:
    """List, export and verify the audit log."""


@audit.command("list")
@click.option("--who", default="", metavar="NAME", help="List audit entries of this user or service.")
@click.option("--action", default="", help="List audit entries with this action, for example token.create.")
@click.option("--subject", default="", help="List audit entries about this identifier or name.")
@click.option(
    "--limit", type=click.IntRange(1, _PAGE), default=50, show_default=True, help="Maximum number of audit entries."
)
@wide_option
@json_option(tuple[ChainedEntry, ...])
def list_entries(who: str, action: str, subject: str, limit: int, wide: bool, as_json: bool) -> None:
    """List the latest audit entries."""
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

    `sgpu audit export` writes one JSON object per line. Before the command appends new entries, it verifies the entries
    of FILE. Run `sgpu audit export` regularly on another machine. An attacker who changes the server's database
    cannot change a copy on another machine.
    """
    with server() as connection, open_copy(file) as (copy, head):
        before = head
        _refuse_another(connection, head, file)
        for page in _pages(connection, after=head.number):
            head = _check_followed(page.entries, after=head)
            append_entries(copy, page.entries)
    say(f"copied {head.number - before.number} new audit entries; {file} ends with {_head_text(head)}")


@audit.command()
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--offline", is_flag=True, help="Verify FILE without contacting the server.")
def verify(file: Path | None, offline: bool) -> None:
    """Verify the chain of the audit log.

    `sgpu audit verify` reads the server's audit chain. With FILE, the command also checks that FILE is part of the
    audit chain. If verification fails, the command exits with 1 and names the first changed, removed or inserted entry.
    """
    if offline:
        if file is None:
            raise click.UsageError("--offline requires the argument FILE")
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
            f"the server's audit log is broken: {problem}",
            hint="find the original audit entries in a copy that `sgpu audit export` wrote",
        )
    return head


def compare_links(links: Iterable[ChainedEntry], copied: Iterator[ChainedEntry], file: Path) -> Iterator[ChainedEntry]:
    """Yield the server's audit entries. Raise AuditBroken if the copy differs or has additional entries."""
    known: ChainedEntry | None = None
    for link in links:
        known = next(copied, None)
        if known is not None and known != link:
            fields = " and ".join(
                name for name in ChainedEntry.__struct_fields__ if getattr(known, name) != getattr(link, name)
            )
            both = (
                f"entry {known.number} of {file} is {_entry_text(known)}, but the server's entry is {_entry_text(link)}"
            )
            raise AuditBroken(
                f"{both}: they differ in {fields}",
                hint="trust the audit entry in a copy that only you can write to",
            )
        yield link
    known = next(copied, None)
    if known is not None:
        raise AuditBroken(
            f"the copy {file} has entry {known.number}, {_entry_text(known)}, which the server does not have"
        )


def _refuse_another(connection: Connection, head: ChainHead, file: Path) -> None:
    """Raise AuditBroken if a copy's last entry differs from the server's entry with the same number."""
    if not head.number:
        return
    asked = {"after": str(head.number - 1), "limit": "1"}
    found = connection.ask("GET", "/audit", answer=AuditPage, query=asked).entries
    if not found or (found[0].number, found[0].sha256) != (head.number, head.sha256):
        raise AuditBroken(
            f"the copy {file} ends with {_head_text(head)}, but the server's entry with the same number differs",
            hint="check the server's address and find the changed audit entry with `sgpu audit verify`. After a "
            "restore from a backup, export into a new file and keep the old file",
        )


def _refuse_stuck(page: AuditPage) -> None:
    since_ns = page.pending_since_ns
    if since_ns is not None and page.now_ns - since_ns > PENDING_S * 1e9:
        raise AuditBroken(
            f"{page.pending} audit entries are not in the audit chain, the oldest since {format_moment(since_ns)}",
            hint="find the reason in the server's log with `sgpu server logs`",
        )


def _entry_text(link: ChainedEntry) -> str:
    return (
        f"{link.action or 'a removed action'} of {link.principal or 'no principal'} on {link.subject or 'no subject'}"
    )


def _head_text(head: ChainHead) -> str:
    return f"entry {head.number}, {head.sha256[:16]}…" if head.number else "no entry"


def read_copy(path: Path) -> Iterator[ChainedEntry]:
    """Yield the audit entries of a copy without verification. Raise InvalidValue for a malformed line."""
    with path.open("rb") as file:
        yield from _links(file, path)


def check_copy(path: Path, *, after: ChainHead = ChainHead()) -> ChainHead:  # noqa: B008 - it cannot change
    """Return the number and digest of a copy's last entry. Raise AuditBroken if the chain is broken."""
    head, problem = follow(read_copy(path), after=after)
    if problem:
        raise AuditBroken(f"{path}: {problem}", hint="compare the file with another copy of the audit log")
    return head


@contextlib.contextmanager
def open_copy(path: Path) -> Iterator[tuple[IO[bytes], ChainHead]]:
    """Yield a copy under an exclusive lock, with the number and digest of its last entry.

    `open_copy` creates a missing file, and raises AuditBroken for a changed copy.
    """
    refuse_irregular(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another process exports the audit log into {path}",
                hint="wait until the other export ends, or name another file",
            ) from None
        except OSError as error:
            raise lock_error(path, error.strerror or str(error), is_home=False) from error
        _cut_torn_line(file)
        head = check_copy(path)
        file.seek(0, os.SEEK_END)
        yield file, head


def append_entries(file: IO[bytes], links: Iterable[ChainedEntry]) -> None:
    """Append audit entries and flush them to disk, so that they survive a power failure."""
    file.write(b"".join(msgspec.json.encode(link) + b"\n" for link in links))
    file.flush()
    os.fsync(file.fileno())


def _links(file: IO[bytes], path: Path) -> Iterator[ChainedEntry]:
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES_MAX), b""), start=1):
        if not line.endswith(b"\n"):
            raise InvalidValue(
                f"line {number} of the copy {path} is incomplete or too long",
                hint="remove an incomplete last line with `sgpu audit export`",
            )
        try:
            yield _decode(line)
        except msgspec.DecodeError as error:
            raise InvalidValue(f"line {number} of the copy {path} is not an audit entry: {error}") from error


def _cut_torn_line(file: IO[bytes]) -> None:
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - LINE_BYTES_MAX)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1 + start
    if end < size and (end > start or start == 0):
        file.truncate(end)
