"""`sgpu usage` against a real server: tables, JSON, CSV, Parquet, who pays what, and rows that billing queries read."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import click
import pyarrow.compute
import pyarrow.parquet
import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli import program
from serverless_gpu.cli.money.usage import FORMULAS
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, StorageError
from serverless_gpu.model.billing import usage_report
from serverless_gpu.model.billing.billing_rows import BillingRow, ListPrice
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.server.db import tables
from serverless_gpu.wire.access import PrincipalRequest, TeamRequest, TeamView, TokenMade
from tests.support.golden import golden
from tests.support.server import ledgered
from tests.support.server.ledgered import HOUR_MS
from tests.support.server.served import Served, served

Said = Callable[..., str]
MONTH, DAY = "2026-10", usage_report.day_of("2026-10-05")
BACK = {"gpu_ms": -HOUR_MS, "billed_ms": -HOUR_MS, "run_ms": -HOUR_MS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Yield a server with a ledger that these tests only read."""
    with served(tmp_path_factory.mktemp("home")) as running:
        admin = running.connection()
        admin.ask("POST", "/teams", TeamRequest(name="search"), answer=TeamView)
        engine = sa.create_engine(f"sqlite:///{running.home}/server/server.db")
        with engine.begin() as connection:
            fill(connection)
        engine.dispose()
        yield running


def fill(connection: sa.Connection) -> None:
    search = ledgered.account(
        connection, team="search", owner="alice", tags={"stage": "eval\x1b[31m"}, pool="lab", reserved=True
    )
    teamless = ledgered.account(connection, owner="carol", name="", workload="kernel", gpu_type="CPU")
    waited, waited_back = HOUR_MS // 2, -HOUR_MS // 2
    ledgered.charge(connection, "r1", search, day=DAY, queued_ms=waited)
    ledgered.charge(
        connection, "r1", search, day=DAY, number=2, kind="reversal", queued_ms=waited_back, micros=-3_000_000, **BACK
    )
    again: dict[str, Any] = {
        "kind": "restated",
        "queued_ms": waited,
        "micros": 2_000_000,
        "core_ms": HOUR_MS,
        "stop_ms": HOUR_MS // 4,
    }
    ledgered.charge(connection, "r1", search, day=DAY, number=3, **again)
    ledgered.charge(connection, "r2", teamless, day=DAY + 1, micros=None)
    ledgered.charge(connection, "r3", search, day=DAY + 2, micros=1_000_000, dbu_micros=8_884_000)
    ledgered.charge(connection, "r4", teamless, day=DAY + 2, micros=1, provisional=True)
    late = ledgered.account(connection, owner="alice")
    ledgered.charge(connection, "r9", late, day=DAY - 60, gpu_ms=1_500, billed_ms=1_500, run_ms=1_500, micros=None)
    book = {"micros_per_hour": 3_000_000, "from_ns": 1, "set_ns": 1, "dbu_micros_per_hour": 0}
    connection.execute(tables.prices.insert(), {"resource": "CPU", "pool": "", **book})
    connection.execute(tables.prices.insert(), {"resource": "H100", "pool": "lab", **book})
    ledgered.seen(connection, "r1", search, day=DAY, observed_ms=1000, busy_ms=250)


@pytest.fixture
def said(server: Served, monkeypatch: pytest.MonkeyPatch) -> Said:
    """Return what runs `sgpu usage` as the administrator, or with another token, and returns what it printed."""
    monkeypatch.setenv("SERVERLESS_GPU_SERVER", server.url)

    def run(*arguments: str, token: str = "", stderr: bool = False) -> str:
        monkeypatch.setenv("SERVERLESS_GPU_TOKEN", token or server.token)
        command = arguments if arguments[0] == "price" else ("usage", *arguments)
        done = CliRunner().invoke(program.sgpu, command, catch_exceptions=False, prog_name="sgpu")
        assert done.exit_code == 0, done.output
        return done.stderr if stderr else done.stdout

    return run


def test_a_report_says_what_was_used_and_what_must_not_be_overlooked(said: Said) -> None:
    assert said("--month", MONTH, "--by", "user,team").splitlines() == [
        golden("server.usage_commands.user-team-runs"),
        "alice  search  2     0.50    2.00  0.25  2.00  2.00    0.00      3.000000 USD  8.884000  25.0 %  75.0 %",
        "carol  -       2     0.00    2.00  0.00  2.00  2.00    1.00      0.000001 USD  0.000000  -       -",
        "all    -       4     0.50    4.00  0.25  4.00  4.00    1.00      3.000001 USD  8.884000  25.0 %  75.0 %",
        golden("server.usage_commands.2026-10-01"),
        golden("server.usage_commands.device-hours-price"),
        golden("server.usage_commands.device-hours-may"),
        *FORMULAS,
    ]
    assert said("--from", "2020-01-01", "--to", "2020-01-31") == golden("server.usage_commands.nothing-used-these")


def test_days_are_chosen_in_one_way_and_values_by_where(said: Said) -> None:
    lines = said("--from", "2026-10-06", "--to", "2026-10-06", "--by", "run").splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["RUN", "r2", "all"]
    assert "alice" not in said("--month", MONTH, "--where", "team=")
    assert said("--month", MONTH, "--where", "tag:stage=eval\x1b[31m", "--by", "").splitlines()[1].startswith("all  2 ")
    assert [line.split()[0] for line in said("--month", MONTH, "--by", "").splitlines()].count("all") == 1
    days = (SystemClock().wall_ns() // DAY_NS) - DAY + 1
    assert "alice" in said("--last", f"{days}d") and "alice" not in said("--last", f"{days - 3}d")
    wrong: tuple[tuple[str, ...], ...] = (
        ("--month", MONTH, "--last", "3d"),
        ("--chargeback", MONTH, "--records"),
        ("--chargeback", MONTH, "--by", "run"),
        ("--records", "--by", "user"),
        ("--json", "--csv"),
        ("--records", "--where", "team=a"),
        ("--last", "5h"),
        ("--where", "team"),
        ("--where", "team=a", "--where", "team=b"),
    )
    for arguments in wrong:
        with pytest.raises(click.ClickException):
            program.sgpu(["usage", *arguments], standalone_mode=False)
    for arguments in (
        ("--by", "owner"),
        ("--where", "owner=a"),
        ("--month", "October"),
        ("--from", "2026-10-02", "--to", "2026-10-01"),
    ):
        with pytest.raises(InvalidValue):
            program.sgpu(["usage", *arguments], standalone_mode=False)


def test_short_times_are_in_a_unit_that_shows_them(said: Said) -> None:
    lines = said("--month", "2026-08").splitlines()
    assert lines[1].split()[:3] == ["alice", "1", "1.50"] and lines[3].endswith("device-seconds")


def test_what_is_cut_is_said(said: Said) -> None:
    lines = said("--month", MONTH, "--by", "run", "--limit", "1").splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["RUN", "r1", "all"]
    assert golden("server.usage_commands.cut-others-used") in lines
    assert "report omits rows" in said("--month", MONTH, "--by", "run", "--limit", "1", "--csv", stderr=True)


def test_a_report_as_json_csv_and_parquet_has_the_same_numbers(said: Said, tmp_path: Path) -> None:
    found = json.loads(said("--month", MONTH, "--by", "user,tag:stage", "--json"))
    assert (found["from"], found["to"], found["is_cut"]) == ("2026-10-01", "2026-10-31", False)
    assert [row["cost"] for row in found["report"]] == ["3.000000", "0.000001"]
    assert found["report"][0]["tag:stage"] == "eval\x1b[31m" and found["report"][0]["idle"] == 0.75
    assert found["totals"][0]["cost"] == "3.000001" and found["formulas"] == list(FORMULAS)
    rows = list(csv.DictReader(io.StringIO(said("--month", MONTH, "--by", "user,tag:stage", "--csv"))))
    path = tmp_path / "usage.parquet"
    assert f"{path}: 2 rows" in said("--month", MONTH, "--by", "user,tag:stage", "--parquet", str(path), stderr=True)
    table = pyarrow.parquet.read_table(path).to_pylist()
    for told, written, stored in zip(found["report"], rows, table, strict=True):
        assert list(told) == list(written) == list(stored)
        assert Decimal(told["cost"]) == Decimal(written["cost"]) == stored["cost"]
        assert told["gpu_ms"] == int(written["gpu_ms"]) == stored["gpu_ms"]
        assert told["unpriced_ms"] == int(written["unpriced_ms"]) == stored["unpriced_ms"]
    assert [path] == list(tmp_path.iterdir())
    with pytest.raises(StorageError, match="cannot be written"):
        said("--month", MONTH, "--parquet", str(tmp_path / "none" / "usage.parquet"))


def test_the_chargeback_of_a_month_adds_up_to_the_micro(said: Said) -> None:
    lines = said("--chargeback", MONTH).splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["WHO", "RUNS", "USED", "BILLED", "UNPRICED", "COST", "PART"],
        ["search", "team", "2", "2.00", "2.00", "0.00", "3.000000", "USD", "100.00", "%"],
        ["carol", "user", "2", "2.00", "2.00", "1.00", "0.000001", "USD", "0.00", "%"],
        ["all", "4", "4.00", "4.00", "1.00", "3.000001", "USD", "100.00", "%"],
    ]
    rows = list(csv.DictReader(io.StringIO(said("--chargeback", MONTH, "--csv"))))
    assert [(row["month"], row["who"], row["is"], float(row["part_of_cost"])) for row in rows] == [
        (MONTH, "search", "team", 3_000_000 / 3_000_001),
        (MONTH, "carol", "user", 1 / 3_000_001),
    ]
    assert sum(Decimal(row["cost"]) for row in rows) == Decimal("3.000001")


def test_a_member_sees_their_teams_and_themselves(server: Served, said: Said) -> None:
    admin = server.connection()
    alice = admin.ask("POST", "/users", PrincipalRequest(name="alice", teams=("search",)), answer=TokenMade).secret
    dora = admin.ask("POST", "/users", PrincipalRequest(name="dora"), answer=TokenMade).secret
    assert "carol" not in said("--month", MONTH, token=alice) and "alice" in said("--month", MONTH, token=alice)
    assert said("--month", MONTH, token=dora) == golden("server.usage_commands.nothing-used-these")
    assert len(said("--month", MONTH, "--records", token=dora).splitlines()) == 1


def put(database: sqlite3.Connection, table: str, text: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(io.StringIO(text)))
    names = list(rows[0])
    database.execute(f"CREATE TABLE {table} ({', '.join(names)})")
    marks = ", ".join("?" for _ in names)
    database.executemany(
        f"INSERT INTO {table} VALUES ({marks})", [[row[name] or None for name in names] for row in rows]
    )
    return rows


def test_billing_queries_read_the_rows(said: Said, tmp_path: Path) -> None:
    database = sqlite3.connect(":memory:")
    rows = put(database, "usage", said("--month", MONTH, "--records"))
    names = list(BillingRow.__struct_fields__)
    assert list(rows[0]) == names
    # As billing queries are written: by date and identity, of serverless GPUs, retractions count against.
    query = """
        SELECT usage_date, json_extract(identity_metadata, '$.run_as'), usage_unit, sum(usage_quantity)
        FROM usage WHERE json_extract(product_features, '$.serverless_gpu') IS NOT NULL
        GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
    """
    assert database.execute(query).fetchall() == [
        ("2026-10-05", "alice", "GPU_HOUR", 1),
        ("2026-10-06", "carol", "SLOT_HOUR", 1),
        ("2026-10-07", "alice", "DBU", 8.884),
        ("2026-10-07", "carol", "SLOT_HOUR", 1),
    ]
    path = tmp_path / "records.parquet"
    said("--month", MONTH, "--records", "--parquet", str(path))
    table = pyarrow.parquet.read_table(path)
    assert table.column_names == names and table.num_rows == len(rows) == 7
    field = pyarrow.compute.field
    devices = table.filter(field("product_features", "serverless_gpu").is_valid())
    assert devices.num_rows == 6  # the seventh is of cores
    reserved = table.filter(field("product_features", "ai_runtime", "compute_type") == "RESERVED_COMPUTE")
    tags = [dict(tags) for tags in reserved["custom_tags"].to_pylist()]
    assert tags == [{"stage": "eval\x1b[31m"}] * 5
    assert table["record_type"].to_pylist()[:4] == ["ORIGINAL", "RETRACTION", "RESTATEMENT", "RESTATEMENT"]
    objects = [json.loads(line) for line in said("--month", MONTH, "--records", "--json").splitlines()]
    assert [one["record_id"] for one in objects] == [row["record_id"] for row in rows]


def test_a_billing_query_joins_rows_with_prices(said: Said) -> None:
    database = sqlite3.connect(":memory:")
    put(database, "usage", said("--month", MONTH, "--records"))
    prices = put(database, "list_prices", said("price", "list", "--records"))
    assert list(prices[0]) == list(ListPrice.__struct_fields__)
    query = """
        SELECT usage.usage_date, json_extract(usage.identity_metadata, '$.run_as') AS who,
               sum(usage.usage_quantity * json_extract(list_prices.pricing, '$.default'))
        FROM usage JOIN list_prices
          ON usage.sku_name = list_prices.sku_name AND usage.cloud = list_prices.cloud
         AND usage.usage_start_time >= list_prices.price_start_time
         AND (list_prices.price_end_time IS NULL OR usage.usage_start_time < list_prices.price_end_time)
        WHERE usage.usage_unit IN ('GPU_HOUR', 'SLOT_HOUR')
        GROUP BY 1, 2 ORDER BY 1, 2
    """
    assert database.execute(query).fetchall() == [
        ("2026-10-05", "alice", 3.0),
        ("2026-10-06", "carol", 3.0),
        ("2026-10-07", "carol", 3.0),
    ]
    lines = [json.loads(line) for line in said("price", "list", "--records", "--json").splitlines()]
    assert [line["sku_name"] for line in lines] == [price["sku_name"] for price in prices]


def test_rows_that_cannot_be_read_have_no_head(
    said: Said, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said("--month", MONTH, "--records")
    monkeypatch.setenv("SERVERLESS_GPU_TOKEN", "nobody's")
    with pytest.raises(ServerlessGpuError):
        program.sgpu(["usage", "--month", MONTH, "--records"], standalone_mode=False)
    assert capsys.readouterr().out == ""
