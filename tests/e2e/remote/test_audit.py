"""`sgpu audit` against a real server: what was done is there, is copied, and whoever changes it is found out."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import pytest

from serverless_gpu.errors import AuditBroken, InvalidValue
from tests.support.local.observe import wait_for
from tests.support.remote.commands import sgpu
from tests.support.remote.server_process import ServerProcess


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def done(action: str, subject: str) -> bool:
    return sgpu("audit", "list", "--action", action, "--subject", subject, "--json").stdout != "[]\n"


def refused(why: str, *arguments: str) -> None:
    with pytest.raises((AuditBroken, InvalidValue), match=re.escape(why)):
        sgpu("audit", *arguments)


def test_what_was_done_is_listed_exported_and_verified(served: Path, tmp_path: Path) -> None:
    assert sgpu("team", "create", "audited").exit_code == 0
    wait_for(lambda: done("team.create", "audited"), "the entry is in the chain")
    assert re.search(r"team.create +audited$", sgpu("audit", "list").stdout, re.MULTILINE)
    copy = tmp_path / "audit.jsonl"
    first = sgpu("audit", "export", str(copy))
    assert first.exit_code == 0 and copy.stat().st_mode & 0o777 == 0o600
    before = lines(copy)
    assert any(line["action"] == "team.create" and line["subject"] == "audited" for line in before)
    assert sgpu("team", "create", "audited-2").exit_code == 0
    wait_for(lambda: done("team.create", "audited-2"), "the second entry is in the chain")
    assert sgpu("audit", "export", str(copy)).exit_code == 0
    assert lines(copy)[: len(before)] == before and len(lines(copy)) > len(before)
    assert "is intact" in sgpu("audit", "verify").stdout
    assert "is intact" in sgpu("audit", "verify", str(copy)).stdout
    assert "is intact" in sgpu("audit", "verify", "--offline", str(copy)).stdout


def test_a_torn_copy_is_mended_and_a_changed_one_is_named(served: Path, tmp_path: Path) -> None:
    copy = tmp_path / "audit.jsonl"
    wait_for(lambda: sgpu("audit", "list", "--json").stdout != "[]\n", "something is in the chain")
    assert sgpu("audit", "export", str(copy)).exit_code == 0
    whole = copy.read_bytes()
    copy.write_bytes(whole[:-20])  # killed while it wrote the last line
    refused("is incomplete", "verify", "--offline", str(copy))
    assert sgpu("audit", "export", str(copy)).exit_code == 0
    assert copy.read_bytes().startswith(whole)
    copy.write_bytes(whole.replace(b'"principal":"', b'"principal":"not-', 1))
    for arguments in (["--offline", str(copy)], [str(copy)]):
        refused("entry 1 ", "verify", *arguments)
    refused("entry 1 ", "export", str(copy))
    copy.write_bytes(b"no audit\n")
    refused("is not an audit entry", "verify", "--offline", str(copy))


@pytest.mark.slow
def test_whoever_changes_the_database_is_found_out(own_server: ServerProcess, home: Path, tmp_path: Path) -> None:
    wait_for(lambda: '"node.join"' in sgpu("audit", "list", "--json").stdout, "the node has joined: nothing more comes")
    for name in ("one", "two", "three"):
        assert sgpu("team", "create", name).exit_code == 0
    wait_for(lambda: done("team.create", "three"), "all is in the chain")
    copy = tmp_path / "audit.jsonl"
    assert sgpu("audit", "export", str(copy)).exit_code == 0
    (entry,) = json.loads(sgpu("audit", "list", "--subject", "two", "--json").stdout)
    with sqlite3.connect(home / "server" / "server.db", timeout=30) as database:
        database.execute("UPDATE audit SET principal = 'eve' WHERE subject = 'two'")
    database.close()
    refused(f"entry {entry['number']} or the entry before it was changed", "verify")
    refused("the server's entry is team.create of eve on two: they differ in principal", "verify", str(copy))
    with sqlite3.connect(
        home / "server" / "server.db", timeout=30
    ) as database:  # and one who hides it by cutting the end off
        database.execute("DELETE FROM audit_links WHERE number >= ?", (entry["number"],))
        database.execute("DELETE FROM audit WHERE seq >= ?", (entry["seq"],))
    database.close()
    assert sgpu("audit", "verify").exit_code == 0  # the chain alone does not show its end
    refused("which the server does not have", "verify", str(copy))
    refused("but the server's entry with the same number differs", "export", str(copy))
