"""`config.toml`: own GPU types and prices, or a sentence that says what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.pricing import Tariff
from serverless_gpu.model.hardware import GpuType, recognise
from serverless_gpu.node.base.configuration import Configuration, read_configuration
from serverless_gpu.node.base.home import Home
from tests.support.golden import golden

GOOD = """
[types.MYCARD]
memory_gib = 48
products = ["ACME Accelerator 48G"]

[types.SMALL]
memory_gib = 0.5
aliases = ["TINY"]

[prices]
H100 = 2.99
L4 = {dbu_per_gpu_hour = 1.5, usd_per_dbu = 0.70}
"""


def home_with(path: Path, text: str) -> Home:
    (path / "config.toml").write_text(text)
    return Home(path)


def test_without_a_file_nothing_is_configured(tmp_path: Path) -> None:
    assert read_configuration(Home(tmp_path)) == Configuration()


def test_types_and_prices(tmp_path: Path) -> None:
    own = read_configuration(home_with(tmp_path, GOOD))
    mine = GpuType(name="MYCARD", memory_bytes=48 * 2**30, products=("ACME Accelerator 48G",))
    assert own.types == (mine, GpuType(name="SMALL", memory_bytes=2**29, aliases=("TINY",)))
    assert own.prices == {
        "H100": Tariff(gpu_micros_per_hour=2_990_000),
        "L4": Tariff(gpu_micros_per_hour=1_050_000, dbu_micros_per_hour=1_500_000),
    }
    assert recognise("ACME Accelerator 48G", 48 * 2**30, (mine,)) == "MYCARD"


def test_what_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_configuration(home_with(tmp_path, "types = ["))
    assert str(caught.value).startswith(f"{tmp_path / 'config.toml'} cannot be read: ")


def test_a_directory_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_configuration(Home(tmp_path))


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b'[types]\nname = "\xff"\n')
    with pytest.raises(InvalidValue, match="cannot be read"):
        read_configuration(Home(tmp_path))


def test_unknown_tables_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_configuration(home_with(tmp_path, "[price]\nH100 = 1\n[gpus]\n"))
    assert str(caught.value) == golden("node.configuration.unknown-tables-gpus", value=tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[types.A]\n", "types: Object missing required field `memory_gib` - at `$[...]`"),
        ("[types.A]\nmemory_gib = 'x'\n", "types: Expected `float`, got `str` - at `$[...].memory_gib`"),
        ("[types.A]\nmemory_gib = 1\nspeed = 2\n", "types: Object contains unknown field `speed` - at `$[...]`"),
        ("types = 5\n", "types: Expected `object`, got `int`"),
        (
            "[prices]\nH100 = 'much'\n",
            "prices: Expected `float | object`, got `str` - at `$[...]`\n"
            "hint: H100 = 2.99, or { dbu_per_gpu_hour = 8.9, usd_per_dbu = 0.7 }",
        ),
        (
            "[prices]\nH100 = -1\n",
            "prices: the price of H100 is -1.0, not between 0 and 100000\n"
            'hint: write the price of one GPU-hour in USD, for example {"H100": 2.99}',
        ),
        ("[retention]\ndays = -1\n", "retention: days must be a number of at least 0, not -1.0"),
    ],
    ids=["memory missing", "memory is text", "unknown field", "no table", "no price", "negative price", "retention"],
)
def test_a_table_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        read_configuration(home_with(tmp_path, text))
    assert str(caught.value) == f"{tmp_path / 'config.toml'}, table {message}", "the file is named once"


@pytest.mark.parametrize("memory", ["-1", "nan", "inf"])
def test_memory_that_cannot_be(tmp_path: Path, memory: str) -> None:
    with pytest.raises(InvalidValue):
        read_configuration(home_with(tmp_path, f"[types.A]\nmemory_gib = {memory}\n"))


def test_where_checkpoints_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert read_configuration(home_with(tmp_path, "")).checkpoints == ""
    own = read_configuration(home_with(tmp_path, '[checkpoints]\ndirectory = "~/kept"\n'))
    assert own.checkpoints == "/home/ada/kept"
    with pytest.raises(InvalidValue, match=re.escape(golden("node.configuration.table-checkpoints-directory"))):
        read_configuration(home_with(tmp_path, '[checkpoints]\ndirectory = "kept"\n'))
