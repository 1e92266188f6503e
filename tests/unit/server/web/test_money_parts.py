"""Pure parts of the pages about money: charts, CSV cells, form values, tags, and the pages of commands."""

from __future__ import annotations

import csv
import io

import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.billing.usage_report import unit_economics
from serverless_gpu.server.web.downloads import csv_cell, csv_pieces
from serverless_gpu.server.web.form_values import amount, count, lines, moment_ns, names, seconds
from serverless_gpu.server.web.list_pages import page_of
from serverless_gpu.server.web.pages.policies import PolicyForm, form_of
from serverless_gpu.server.web.pages.prices import tariffs
from serverless_gpu.server.web.pages.usage import _parse_tags, _write_tags
from serverless_gpu.server.web.stacked_chart import HEIGHT, OTHERS, SERIES_MAX, round_up, stack, steps
from serverless_gpu.wire.access import view_of
from serverless_gpu.wire.billing import PriceView


def test_segments_of_a_column_meet_and_end_at_its_total() -> None:
    chart = stack(["a", "b"], {("a", "x"): 30, ("a", "y"): 10, ("b", "x"): 5}, {})
    assert [one.label for one in chart.series] == ["x", "y"]
    assert chart.top == 50
    low, high = chart.columns[0].segments
    assert low.y + low.height == HEIGHT
    assert high.y + high.height == low.y
    assert high.y == pytest.approx(HEIGHT * (1 - 40 / 50))
    assert [column.total for column in chart.columns] == [40, 5]
    assert chart.columns[0].x + chart.columns[0].width < chart.columns[1].x


def test_many_series_become_others_and_keep_the_total() -> None:
    values = {("a", f"s{number:02d}"): 100 - number for number in range(20)}
    chart = stack(["a"], values, {"a": 7})
    assert len(chart.series) == SERIES_MAX + 1
    assert chart.series[-1].number == OTHERS
    assert chart.columns[0].total == sum(values.values()) + 7
    assert sum(part.value for part in chart.columns[0].segments) == chart.columns[0].total


def test_nine_series_need_no_others() -> None:
    chart = stack(["a"], {("a", f"s{number}"): 1 for number in range(9)}, {})
    assert [one.label for one in chart.series] == [f"s{number}" for number in range(9)]


def test_a_chart_without_values_or_with_corrections_below_zero_is_flat() -> None:
    chart = stack(["a"], {("a", "x"): -5}, {"a": -1})
    assert chart.columns[0].segments == ()
    assert chart.series == ()
    assert stack([], {}, {}).labels == ()


@pytest.mark.parametrize(("value", "top"), [(0, 1), (1, 1), (3, 5), (5, 5), (51, 100), (199, 200), (201, 500)])
def test_the_upper_edge_is_a_round_number(value: int, top: int) -> None:
    assert round_up(value) == top


def test_steps_cover_the_time_that_a_price_holds() -> None:
    first, second = steps([(0, 50, 10), (50, None, 20)], from_ns=0, until_ns=100, height=48)
    assert (first.x, first.width, second.x, second.width) == (0, 50, 50, 50)
    assert first.height * 2 == second.height


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
def test_a_cell_is_never_a_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


def test_numbers_and_lines_survive_a_csv_file() -> None:
    rows = [("a,b\nc", -1, None), ("x", 2.5, "y")]
    data = b"".join(csv_pieces(("n", "v", "w"), rows)).decode()
    assert list(csv.reader(io.StringIO(data))) == [["n", "v", "w"], ["a,b\nc", "-1", ""], ["x", "2.5", "y"]]


def test_a_page_of_a_list_begins_after_the_cursor() -> None:
    items = [f"{number}" for number in range(5)]
    first = page_of(items, str, "", rows=2)
    assert (first.rows, first.cursor, first.total) == (["0", "1"], "1", 5)
    assert page_of(items, str, "3", rows=2) == (["4"], "", 5)
    assert page_of(items, str, "gone", rows=2) == first
    assert page_of([], str, "", rows=2) == ([], "", 0)


def test_form_values_are_read_as_people_type_them() -> None:
    assert amount("limit", " 12.5 ") == 12_500_000
    assert amount("limit", "2", unit=3_600_000) == 7_200_000
    assert (seconds("time", "12h"), seconds("time", " ")) == (43_200.0, None)
    assert (count("GPUs", "8"), count("GPUs", "")) == (8, None)
    assert moment_ns("start", "1970-01-02") == 86_400_000_000_000
    assert names("a, b,\n c,") == ("a", "b", "c")
    assert lines(" a \n\nb") == ("a", "b")


@pytest.mark.parametrize("text", ["1,5", "-1", "nan", "1e400", "0.0000001", ""])
def test_a_wrong_amount_is_refused_with_its_field(text: str) -> None:
    with pytest.raises(InvalidValue, match=r"^limit: "):
        amount("limit", text)


@pytest.mark.parametrize("read", [count, seconds, moment_ns])
def test_other_wrong_values_are_refused_with_their_field(read: object) -> None:
    with pytest.raises(InvalidValue, match=r"^field: "):
        read("field", "soon")  # type: ignore[operator]  # one of three functions


@pytest.mark.parametrize(
    "tags", [{}, {"project": "atlas"}, {"a,b": "c%2C,d", "stage": "="}, {"k": ""}, {"ключ": "значение 1"}]
)
def test_tags_survive_an_address(tags: dict[str, str]) -> None:
    assert _parse_tags(_write_tags(tags)) == tags


def test_a_policy_survives_its_form() -> None:
    form = PolicyForm(
        name="p",
        pools="a, b",
        gpu_types="H100",
        gpus_per_run="2",
        max_run="36h",
        idle="90s",
        timeout="2w",
        required_tags="project\nstage=dev,prod",
        default_tags="owner=me=you",
        mandatory="yes",
    )
    policy = form.policy()
    again = form_of(view_of("p", policy)).policy()
    assert again == policy
    assert policy.required_tags == {"project": (), "stage": ("dev", "prod")}
    assert policy.default_tags == {"owner": "me=you"}


def test_unit_economics_start_with_the_highest_total() -> None:
    found = unit_economics([("a", "USD", 1, 10), ("a", "USD", 3, 30), ("a", "USD", 11, 20), ("b", "USD", 40, 5)])
    assert [(one.name, one.runs, one.mean_micros, one.median_micros, one.median_gpu_ms) for one in found] == [
        ("b", 1, 40, 40, 5),
        ("a", 3, 5, 3, 20),
    ]


def test_a_tariff_marks_planned_prices() -> None:
    def price(from_ns: int, until_ns: int | None, micros: int) -> PriceView:
        return PriceView(
            resource="H100",
            pool="",
            micros_per_hour=micros,
            dbu_micros_per_hour=0,
            from_ns=from_ns,
            until_ns=until_ns,
            set_ns=5,
            in_force=until_ns is not None,
        )

    (tariff,) = tariffs([price(0, 100, 2_000_000), price(100, None, 1_000_000)], 50, "USD")
    assert tariff.planned == (False, True)
    assert tariff.steps[0].height == 2 * tariff.steps[1].height
    assert tariffs([price(0, None, 1)], 50, "USD") == []
