"""`sgpu advise`: what it prints, where it looks, and what is wrong with what was typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from serverless_gpu.ambient import SystemClock, new_run_id
from serverless_gpu.cli.planning import advise
from serverless_gpu.cli.program import sgpu
from serverless_gpu.errors import InvalidValue, ServerlessGpuError, StorageError
from serverless_gpu.model.hardware import GIB, DeviceKind
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.model.receipt import DeviceUse, Receipt, Segments
from tests.support.golden import golden

# 10 hours: 2 GPUs for all of it, 4 more for 6 hours, 2 more for 1, as in test_advice.py of the model; and others.
CSV = """job_id,submit_time_s,duration_s,num_gpus,vc,gpu_type
a,0,36000,2,search,H100
b,3600,21600,4,search,H100
c,10800,3600,2,vision,H100
d,18000,60,1,vision,A10
e,36000,3600,1,vision,H100
f,35940,120,1,speech,L4
"""
PRICES = ("--reserved", "1", "--on-demand", "2")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVERLESS_GPU_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "four.csv"
    path.write_text(CSV, encoding="utf-8")
    return str(path)


def ran(*arguments: str) -> Result:
    result = CliRunner().invoke(sgpu, ["advise", *arguments], catch_exceptions=True)
    if isinstance(result.exception, ServerlessGpuError):
        raise result.exception
    return result


def test_a_table(trace: str) -> None:
    result = ran(trace, *PRICES, "--have", "8", "--waiting", "0.5")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[:7] == [
        golden("replay.advise_command.h100-four-csv"),
        golden("replay.advise_command.left-out-gpu"),
        golden("replay.advise_command.also-used-l4"),
        "used: 46.0 GPU-hours",
        golden("replay.advise_command.wanted-once-gpus"),
        golden("replay.advise_command.reserved-00-demand"),
        golden("replay.advise_command.reserve-16-00"),
    ]
    rows = [line.split("  ") for line in lines]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert ["advised", "6", "60.00 USD", "16.00 USD", "4.00 USD", "64.00 USD", "73.3 %"] in cells
    assert [
        golden("replay.advise_command.today-enough-peak"),
        "8",
        "80.00 USD",
        "34.00 USD",
        "0.00 USD",
        "80.00 USD",
        "57.5 %",
    ] in cells
    assert ["3–6", "60.0 %", "yes"] in cells
    assert ["reserved price +20 %", "2", "76.00 USD", "76.00 USD"] in cells
    # On 6 GPUs the third run waits for the second until 7:00, 4 hours with its 2 GPUs.
    assert ["6", "1 h 20 min", "3 h 36 min", "8.0 GPU-hours", "4.00 USD", "4.00 USD", "0.50 per GPU-hour"] in cells
    assert lines[-1] == golden("replay.advise_command.runs-nothing-known")


def test_every_number_has_its_formula(trace: str) -> None:
    lines = ran(trace, *PRICES, "--explain").output.splitlines()
    told = {line.strip().split(":")[0] for line in lines[lines.index("formulas:") + 1 :]}
    shown = {"break-even duty", "wanted", "pays", "reserved", "of that idle", "on demand", "together", "duty", "if"}
    assert shown | {"GPU time waited", "waiting costs", "on demand instead", "worth it below", "saves"} <= told


def test_the_same_as_json(trace: str) -> None:
    told = json.loads(ran(trace, *PRICES, "--json").output)
    advice = told["advice"]
    assert (told["gpu_type"], advice["reserve"], advice["peak"], advice["used_gpu_ms"]) == (
        "H100",
        6,
        8,
        46 * 3_600_000,
    )
    assert (advice["best"]["micros"], advice["best"]["idle_micros"]) == (64_000_000, 16_000_000)
    assert [slot["pays"] for slot in advice["slots"]] == [True, True, False]
    assert told["formulas"]["break-even duty"].endswith("= 50.0 %")


def test_one_team_and_one_type(trace: str) -> None:
    told = json.loads(ran(trace, *PRICES, "--json", "--team", "vision", "--gpu-type", "a10").output)
    assert (told["gpu_type"], told["attempts"], told["gpu_ms"]) == ("A10", 3, 60_000)
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.advise_command.such-jobs"))):
        ran(trace, *PRICES, "--team", "sales")
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.advise_command.nothing-used-a100"))):
        ran(trace, *PRICES, "--gpu-type", "A100", "--team", "vision")


def test_prices_of_the_configuration(trace: str, home: Path) -> None:
    (home / "config.toml").write_text("[prices]\nH100 = 2.0\n", encoding="utf-8")
    assert golden("replay.advise_command.reserve-28-00") in ran(trace, "--reserved", "1").output.splitlines()
    # 8,766 for a GPU over 2 years of 8,766 hours is 0.50 an hour.
    bought = ran(trace, "--buy", "8766", "--years", "2", "--running", "0.5").output.splitlines()
    assert golden("replay.advise_command.reserve-28-00") in bought


def test_no_price_is_made_up(trace: str) -> None:
    assert golden("replay.advise_command.h100-price-demand") in ran(trace).output
    assert golden("replay.advise_command.reserved-gpu-costs") in ran(trace, "--on-demand", "2").output
    assert (
        golden("replay.advise_command.h100-costs-nothing") in ran(trace, "--on-demand", "0", "--reserved", "1").output
    )
    assert json.loads(ran(trace, "--json").output)["advice"] is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--reserved", "-1"), "not an amount from 0"),
        (("--reserved", "1x"), "is not a number"),
        (("--reserved", "2e6"), "not an amount from 0 to 1,000,000"),
        (("--reserved", "1e999999"), "not an amount from 0"),
        (("--reserved", "0.0000001"), "more than six digits"),
        (("--reserved", "nowhere"), "nor the name of a pool that has a price for H100"),
        (("--reserved", "nan"), "'nan' is neither an amount"),
        (("--reserved", "1", "--buy", "5"), "specify only one of --buy and --reserved"),
        (("--buy", "nan"), "--years must be between 0.1 and 100"),
        (("--buy", "5", "--years", "0"), "--years must be between 0.1 and 100"),
        (("--waiting", "soon", *PRICES), "is not a number"),
        (("--last", "soon"), "is not a duration"),
        (("--last", "0d"), "the time range must be longer than 0"),
        (("--have", "-1"), "-1 is not in the range"),
    ],
)
def test_what_is_wrong_is_said(trace: str, arguments: tuple[str, ...], why: str) -> None:
    result = ran(trace, *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())


def test_a_picture(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.png"
    assert ran(trace, *PRICES, "--have", "9", "--png", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StorageError, match=re.escape(golden("replay.advise_command.picture-cannot-written"))):
        ran(trace, *PRICES, "--png", str(tmp_path / "gone" / "sizes.png"))


def test_a_picture_of_no_advice_is_not_written(trace: str, tmp_path: Path) -> None:
    result = ran(trace, "--png", str(tmp_path / "sizes.svg"))
    assert golden("replay.advise_command.written-h100-price") in result.output
    assert not (tmp_path / "sizes.svg").exists()


def test_of_many_slots_the_least_sure_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    jobs = "".join(f"{job},{60 * job},{600 + 600 * job},2,search,H100\n" for job in range(40))
    path.write_text(CSV.splitlines()[0] + "\n" + jobs, encoding="utf-8")
    lines = ran(str(path), *PRICES).output.splitlines()
    head = next(place for place, line in enumerate(lines) if line.startswith("SLOT"))
    slots = lines[head + 1 : lines.index("", head)]
    assert len(slots) == advise.SLOTS_MAX
    assert [line.split()[-1] for line in slots] == sorted((line.split()[-1] for line in slots), reverse=True)


# --- this machine's runs ----------------------------------------------------------------------------------------------


def an_ended_run(home: Path, name: str, *, hours: float, busy: float, runs: int | None = None) -> None:
    """Write the directory of a run that has just ended, after so many hours on two H100."""
    now_ns, held_ms = SystemClock().wall_ns(), round(hours * 3_600_000)
    run_id = new_run_id()
    directory = home / "runs" / run_id / "1"
    directory.mkdir(parents=True)
    uses = [
        DeviceUse(uuid=f"G{at}", samples=held_ms // 1000, busy_percent=busy, peak_memory_bytes=GIB) for at in (0, 1)
    ]
    receipt = Receipt(
        run_id=run_id,
        fence=1,
        state="SUCCEEDED",
        reason=None,
        gpu_type="H100",
        gpus=("G0", "G1"),
        kind=DeviceKind.GPU,
        segments=Segments(queued_ms=held_ms),
        gpu_ms=2 * held_ms,
        micros=None,
        currency="USD",
        peak_memory_bytes=None,
        warm=True,
        warm_reason="",
        gate="",
        quarantined=(),
        tags={},
        facts=1,
        world_size=2,
        uses=tuple(uses),
        runs=runs,
    )
    fact = Fact(
        attempt=f"{run_id}:1",
        seq=1,
        kind=FactKind.HELD if runs else FactKind.EXEC,
        boot_id="b",
        boottime_ns=1,
        wall_ns=now_ns - held_ms * 1_000_000,
        gpus=("G0", "G1"),
        cpus=0,
        memory_bytes=0,
    )
    spec = {"world_size": 2, "kind": "session" if runs else "function", "spec": {"name": name, "team": "search"}}
    (directory / "spec.json").write_bytes(msgspec.json.encode(spec))
    (directory / "facts.jsonl").write_bytes(msgspec.json.encode(fact) + b"\n")
    (directory / "receipt.json").write_bytes(msgspec.json.encode(receipt))


def test_runs_of_this_machine(home: Path) -> None:
    (home / "config.toml").write_text("[prices]\nH100 = 3.0\nL4 = 1.0\n", encoding="utf-8")
    an_ended_run(home, "train", hours=4, busy=80)
    an_ended_run(home, "clean", hours=1, busy=1)
    (home / "runs" / new_run_id() / "1").mkdir(parents=True)  # of a client that was killed
    told = json.loads(ran("--json", "--reserved", "1", "--team", "search").output)
    assert (told["attempts"], told["gpu_ms"], told["waited_gpu_ms"]) == (2, 10 * 3_600_000, 10 * 3_600_000)
    assert told["left_out"] == []
    # Both were asked for twice as early as they began, so nothing is wanted for the last hour: 8 hours, 4 and 1 of use.
    assert told["advice"]["span_ms"] == pytest.approx(8 * 3_600_000, abs=5_000)
    assert told["advice"]["used_gpu_ms"] == pytest.approx(10 * 3_600_000, abs=5_000)
    assert [(run["name"], run["verdict"], run["types"], run["saves_micros"]) for run in told["runs"]] == [
        ("train", "smaller", ["L4"], 16_000_000),
        ("clean", "cpu", ["CPU"], None),
    ]
    lines = ran("--reserved", "1").output.splitlines()
    assert lines[0].startswith("H100: the runs of this machine, ")
    assert golden("replay.advise_command.left-out-runs") in lines
    assert lines[-1].endswith("this is CPU work: GPUs worked 1.0 % of the time")


def test_a_session_counts_for_as_long_as_it_was_idle(home: Path) -> None:
    an_ended_run(home, "session", hours=0.5, busy=0, runs=3)
    told = json.loads(ran("--json", "--reserved", "1", "--on-demand", "2").output)
    assert told["gpu_ms"] == 3_600_000
    assert told["left_out"] == []


def test_runs_of_before_are_left_out(home: Path) -> None:
    an_ended_run(home, "train", hours=4, busy=80)
    with pytest.raises(InvalidValue, match="no usage found"):
        ran("--last", "1s", "--team", "vision")


def test_a_machine_without_runs(home: Path) -> None:
    with pytest.raises(InvalidValue, match=re.escape(golden("replay.advise_command.runs-machine-nothing"))):
        ran()
