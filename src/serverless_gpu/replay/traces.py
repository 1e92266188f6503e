"""Reads a trace of a cluster's jobs from a file, or generates a trace from a seed.

    .parquet  .csv   columns job_id, submit_time_s, duration_s, num_gpus; optionally cluster, vc, team, user …
    .json            Philly's `cluster_job_log`, or the output of `sgpu runs --json`
    generate()       the same seed and parameters give the same trace

A generated trace matches real traces only in the figures that determine the behaviour of a queue:

    sizes       83 % of jobs have one GPU, and 13 % of the GPU time; 10 % have a whole node, and 49 % of the GPU time
    durations   log-normal within a size; 0.1 to 0.3 % of jobs take longer than a week, and 8 to 28 % of the GPU time
    arrivals    in bursts: a user submits several jobs at once, nights are quieter, and the busiest hour has 11 times
                the jobs of the mean hour; gaps between jobs vary 3 to 13 times as much as their mean
    people      few users of few teams have most of the jobs

Failure cases: For an unreadable or invalid file, the reader raises `InvalidValue` with the file's name and the expected
format. The reader leaves out invalid rows (never ran, no GPUs, no end) and counts the rows by reason.
"""

from __future__ import annotations

import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from serverless_gpu.errors import InvalidValue, ServerlessGpuError
from serverless_gpu.json_codec import from_builtins
from serverless_gpu.model.scheduling.values import CLASSES, NORMAL

NEEDED = ("submit_time_s", "duration_s", "num_gpus")
_BYTES_MAX = 2 * 1024**3
_CLASSES = {name.lower(): number for number, name in enumerate(CLASSES)}
_GROUPS = ("team", "vc")
_TRUE = frozenset({"1", "true", "yes"})

Row = Mapping[str, Any]


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job of a trace."""

    job_id: str  # ID of the job in the trace.
    submit_s: float  # Arrival time in seconds on the trace's own clock.
    duration_s: float  # Seconds for which the job had its GPUs.
    gpus: int  # Number of GPUs of the job.
    # Team of the job; "" if the trace has no value. The fields `user`, `name`, `pool` and `gpu_type` are also ""
    # without a value.
    team: str = ""
    user: str = ""
    name: str = ""
    pool: str = ""
    gpu_type: str = ""
    priority: int = NORMAL  # Priority class, numbered as in `model.scheduling.values`.
    preemptible: bool = False  # True when the scheduler may stop and resume the job.


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in the order of arrival."""

    jobs: tuple[Job, ...]  # Jobs sorted by arrival. Jobs with equal times keep the order of the trace.
    source: str = ""  # Origin of the trace, as text.
    left_out: Mapping[str, int] = {}  # Number of invalid rows, by reason.

    def gpu_seconds(self) -> float:
        """Return the total GPU-seconds of all jobs."""
        return math.fsum(job.gpus * job.duration_s for job in self.jobs)

    def span_s(self) -> float:
        """Return the seconds between the first and the last arrival."""
        return self.jobs[-1].submit_s - self.jobs[0].submit_s if self.jobs else 0.0


def trace_of(jobs: Iterable[Job], source: str = "", left_out: Mapping[str, int] | None = None) -> Trace:
    """Return a trace of the given jobs, which may be in any order."""
    ordered = tuple(sorted(jobs, key=lambda job: job.submit_s))
    return Trace(jobs=ordered, source=source, left_out=left_out or {})


class _NoJob(Exception):
    """Raised for a row that is not a valid job, with the reason as the message."""


def read_trace(path: Path, only: Mapping[str, str] | None = None) -> Trace:
    """Return the jobs of a ``.parquet``, ``.csv`` or ``.json`` file.

    `only` selects rows with these column values, such as ``{"cluster": "cluster04"}``. Raises InvalidValue when the
    file is not a valid trace or has no job. Raises ServerlessGpuError when pyarrow is required but not installed.
    """
    readers: dict[str, Callable[[Path], Iterable[Row]]] = {".parquet": _parquet, ".csv": _csv, ".json": _json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidValue(f"{path} is not a trace file", hint="give a .parquet, .csv or .json file")
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise InvalidValue(f"{path} is larger than 2 GiB, the maximum", hint="replay only a part of the trace")
        rows = reader(path)
        trace = jobs_of(rows, str(path.name), only or {})
    except OSError as error:
        raise InvalidValue(f"{path} cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidValue(f"{path} is not a valid trace: {error}") from None
    return trace


def jobs_of(rows: Iterable[Row], source: str, only: Mapping[str, str]) -> Trace:
    """Return a trace of the jobs in rows. Raises InvalidValue for a missing column, or without a job."""
    jobs: list[Job] = []
    left_out: Counter[str] = Counter()
    for place, row in enumerate(rows):
        if place == 0:
            _check_columns(row, source, only)
        if any(str(row.get(column)) != value for column, value in only.items()):
            continue
        try:
            jobs.append(_job(row, place))
        except _NoJob as why:
            left_out[str(why)] += 1
    if not jobs:
        wanted = ", ".join(f"{column}={value}" for column, value in only.items())
        raise InvalidValue(
            f"{source} has no jobs" + (f" with {wanted}" if wanted else ""),
            hint="; ".join(f"{count} {why}" for why, count in left_out.items()),
        )
    return trace_of(jobs, source, dict(left_out))


def _check_columns(row: Row, source: str, only: Mapping[str, str]) -> None:
    missing = [name for name in (*NEEDED, *only) if name not in row]
    if missing:
        raise InvalidValue(
            f"{source} has no column {missing[0]}, but only {', '.join(row)}",
            hint=f"a trace needs at least the columns {', '.join(NEEDED)}",
        )


def _job(row: Row, place: int) -> Job:
    gpus, duration_s = _number(row, "num_gpus"), _number(row, "duration_s")
    if gpus < 1:
        raise _NoJob("without GPUs")
    if gpus != int(gpus):
        raise _NoJob("with a fractional number of GPUs")
    if duration_s <= 0:
        raise _NoJob("that never ran")
    return Job(
        job_id=str(row.get("job_id", place)),
        submit_s=_number(row, "submit_time_s"),
        duration_s=duration_s,
        gpus=int(gpus),
        team=next((str(row[name]) for name in _GROUPS if row.get(name)), ""),
        user=str(row.get("user") or ""),
        name=str(row.get("name") or ""),
        pool=str(row.get("pool") or ""),
        gpu_type=str(row.get("gpu_type") or ""),
        priority=_class_of(str(row.get("priority") or "").lower()),
        preemptible=str(row.get("preemptible") or "").lower() in _TRUE,
    )


def _class_of(text: str) -> int:
    """Return a priority class. Numeric values are priorities of another scheduler and count as normal."""
    if text and text not in _CLASSES and not text.lstrip("-").isdecimal():
        raise _NoJob("whose priority is not critical, normal or best_effort")
    return _CLASSES.get(text, NORMAL)


def _number(row: Row, column: str) -> float:
    try:
        value = float(row[column])
    except (KeyError, TypeError, ValueError):
        raise _NoJob(f"without a {column}") from None
    if not abs(value) < 1e15:
        raise _NoJob(f"without a {column}")
    return value


# --- file formats -----------------------------------------------------------------------------------------------------


def _parquet(path: Path) -> Iterable[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        message = "parquet traces require pyarrow, which this Python does not have"
        raise ServerlessGpuError(message, hint="pip install 'serverless-gpu[simulate]'") from None
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise InvalidValue(f"{path} is not a valid parquet file: {error}") from None
    return rows


def _csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from csv.DictReader(file)


def _json(path: Path) -> Iterable[Row]:
    rows = msgspec.json.decode(path.read_bytes())
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        hint = "give a list of jobs, such as Philly's cluster_job_log or the output of `sgpu runs --json`"
        raise InvalidValue(f"{path} is not a valid trace: it is not a list of jobs", hint=hint)
    return rows_of_json(rows)


def rows_of_json(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield trace columns from jobs of Philly's log or of `sgpu runs --json`, and other rows unchanged."""
    for row in rows:
        if "submitted_time" in row:
            yield _philly(row)
        elif "created" in row:
            yield _own(row)
        else:
            yield row


class _Place(msgspec.Struct):
    gpus: list[str] | None = None


class _Attempt(msgspec.Struct):
    start_time: str | None = None
    end_time: str | None = None
    detail: list[_Place] | None = None


class _Philly(msgspec.Struct):
    """A job in Philly's log."""

    jobid: str = ""
    submitted_time: str | None = None
    vc: str | None = None
    user: str | None = None
    status: str | None = None
    attempts: list[_Attempt] | None = None


def _philly(row: Row) -> Row:
    """Return a job of Philly's log with the total duration and the most GPUs of its attempts."""
    job = from_builtins(row, _Philly)
    duration_s, gpus = 0.0, 0
    for attempt in job.attempts or ():
        began, ended = _moment(attempt.start_time), _moment(attempt.end_time)
        if began is not None and ended is not None:
            duration_s += ended - began
        gpus = max(gpus, sum(len(place.gpus or ()) for place in attempt.detail or ()))
    return {
        "job_id": job.jobid,
        "submit_time_s": _moment(job.submitted_time),
        "duration_s": duration_s,
        "num_gpus": gpus,
        "vc": job.vc,
        "user": job.user,
        "status": job.status,
    }


def _own(row: Row) -> Row:
    """Return a row of `sgpu runs --json` as a job that had its devices from its start to its end."""
    created, started, ended = (_moment(row.get(name)) for name in ("created", "started", "ended"))
    return {
        "job_id": row.get("id", ""),
        "submit_time_s": created,
        "duration_s": None if started is None or ended is None else ended - started,
        "num_gpus": row.get("gpus") or len(row.get("devices") or ()) or row.get("ranks"),
        **{name: row.get(name) for name in ("team", "name", "state", "pool", "node")},
        "user": row.get("owner"),
    }


def _moment(text: object) -> float | None:
    """Return seconds since 1970 for a timestamp in a log. A timestamp without a time zone is UTC."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# --- generated traces -------------------------------------------------------------------------------------------------


JOBS_MAX = 1_000_000
PEAK = 11.0
"""Ratio of jobs in the busiest hour to the mean hour."""


class _Size(NamedTuple):
    """A job size, with its share of all jobs and of all GPU time."""

    gpus: int
    of_jobs: float
    of_time: float


_SIZES = (
    _Size(1, 0.830, 0.13),
    _Size(2, 0.035, 0.03),
    _Size(4, 0.025, 0.06),
    _Size(8, 0.100, 0.49),
    _Size(16, 0.006, 0.10),
    _Size(32, 0.003, 0.11),
    _Size(64, 0.001, 0.08),
)


_SINGLE_MEAN_S = 3 * 3600.0
_SPREAD = 1.6
_SHORTEST_S, _LONGEST_S = 30.0, 45 * 86_400.0
_HOUR_S = 3600.0
_ENOUGH = 100  # Minimum number of jobs of one size for scaling their mean to the exact value.
_BATCH_MEAN = 4.0
_TEAMS = ("search", "vision", "speech", "ads", "robotics")
_USERS = 40
_NAMES_EACH = 4


def generate(jobs: int, *, gpus: int, load: float = 0.9, seed: int = 0) -> Trace:
    """Return a generated trace for a cluster of `gpus` GPUs. No job has more GPUs than the cluster.

    `load` is the GPU time of all jobs divided by the cluster's GPU time until the last arrival. Raises InvalidValue
    when a number is out of range.
    """
    if not 1 <= jobs <= JOBS_MAX:
        raise InvalidValue(f"cannot generate {jobs} jobs: the number is out of range", hint=f"1 to {JOBS_MAX}")
    if not 0.01 <= load <= 10:
        raise InvalidValue(
            f"cannot generate a load of {load:g}: it is out of range",
            hint="use 0.01 to 10; a load of 0.9 fills the cluster",
        )
    chance = random.Random(seed)
    sizes = [size for size in _SIZES if size.gpus <= gpus]
    drawn = chance.choices(sizes, weights=[size.of_jobs for size in sizes], k=jobs)
    durations = _durations(drawn, chance)
    work = math.fsum(size.gpus * duration for size, duration in zip(drawn, durations, strict=True))
    arrivals = _arrivals(jobs, work / (gpus * load), chance)
    people = list(_people(arrivals, chance))
    made = (
        Job(
            job_id=str(place),
            submit_s=at_s,
            duration_s=duration,
            gpus=size.gpus,
            team=_TEAMS[user % len(_TEAMS)],
            user=f"user{user:02}",
            name=f"job{name}",
        )
        for place, (size, duration, (at_s, _), (user, name)) in enumerate(
            zip(drawn, durations, arrivals, people, strict=True)
        )
    )
    return trace_of(made, f"generated: {jobs} jobs, seed {seed}")


def _durations(drawn: list[_Size], chance: random.Random) -> list[float]:
    """Return job durations, scaled so that each size gets its share of the GPU time."""
    single = _SIZES[0]
    raw = [chance.lognormvariate(-(_SPREAD**2) / 2, _SPREAD) for _ in drawn]
    sums: dict[_Size, float] = {}
    for size, duration in zip(drawn, raw, strict=True):
        sums[size] = sums.get(size, 0.0) + duration
    counts = Counter(drawn)
    scales = {
        size: _SINGLE_MEAN_S
        * (size.of_time / (size.of_jobs * size.gpus))
        / (single.of_time / single.of_jobs)
        * (counts[size] / sums[size] if counts[size] >= _ENOUGH else 1.0)
        for size in counts
    }
    return [
        min(_LONGEST_S, max(_SHORTEST_S, scales[size] * duration)) for size, duration in zip(drawn, raw, strict=True)
    ]


def _arrivals(jobs: int, span_s: float, chance: random.Random) -> list[tuple[float, int]]:
    """Return arrival times and burst numbers, in order of time."""
    hours = max(1, math.ceil(span_s / _HOUR_S))
    bounds = list(accumulate(_hour_weights(hours, chance)))
    arrivals: list[tuple[float, int]] = []
    burst = 0
    while len(arrivals) < jobs:
        hour = chance.choices(range(hours), cum_weights=bounds)[0]
        at_s = min(span_s, (hour + chance.random()) * _HOUR_S)
        for _ in range(min(jobs - len(arrivals), 1 + int(chance.expovariate(1 / (_BATCH_MEAN - 1))))):
            arrivals.append((round(at_s, 3), burst))
            at_s += chance.expovariate(1 / 2.0)
        burst += 1
    return sorted(arrivals)


def _hour_weights(hours: int, chance: random.Random) -> list[float]:
    """Return hour weights by time of day, weekend and chance. No weight exceeds `PEAK` times the mean."""
    raw = [
        (1.0 + 0.6 * math.sin(2 * math.pi * (hour % 24 - 9) / 24))
        * (0.6 if hour // 24 % 7 >= 5 else 1.0)
        * chance.lognormvariate(0, 0.7)
        for hour in range(hours)
    ]
    peak = min(PEAK, max(1.0, hours / 4))
    low, high = 0.0, 8.0
    for _ in range(40):
        power = (low + high) / 2
        weights = [weight**power for weight in raw]
        low, high = (power, high) if max(weights) * hours < peak * math.fsum(weights) else (low, power)
    return weights


def _people(arrivals: list[tuple[float, int]], chance: random.Random) -> list[tuple[int, int]]:
    """Return the user and name of each job, which are equal for all jobs of a burst."""
    weights = [1 / (user + 1) for user in range(_USERS)]
    bursts: dict[int, tuple[int, int]] = {}
    for _, burst in arrivals:
        if burst not in bursts:
            user = chance.choices(range(_USERS), weights=weights)[0]
            bursts[burst] = (user, chance.randrange(_NAMES_EACH))
    return [bursts[burst] for _, burst in arrivals]
