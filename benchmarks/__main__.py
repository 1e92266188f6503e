"""Run the benchmarks: `python -m benchmarks [--quick] [--only NAME ...] [--json FILE]`.

Prints a Markdown table and writes JSON. Exit status: 0 when every row was measured (a missed bar is a result, not an
error), 1 when one could not be, 2 for a usage error. `--strict` makes a missed bar an error, too.

`--record-ranges` measures the rows of `ranges.ROWS` five times and keeps what came in `benchmarks/ranges.json`;
`--check` measures them once and exits with 1 when a median is more than a fifth over what was recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import ranges
from benchmarks.contestants import ContestantFailed, wait_for_quiet
from benchmarks.report import Report, Row, describe_machine
from benchmarks.rows import ROWS, measure
from serverless_gpu.errors import ServerlessGpuError

_QUIET_S = 5.0


def main() -> int:
    """Measure what was asked for; return the exit status."""
    options = _options()
    if options.record_ranges or options.check:
        return _ranges(options)
    report = Report(machine=describe_machine())
    for name in options.only or ROWS:
        if not wait_for_quiet():
            print(f"{name}: the machine is busy with something else; measured anyway", file=sys.stderr)
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            report.rows.append(measure(name, options.quick))
        except (ContestantFailed, ServerlessGpuError) as failure:
            report.failures.append(f"{name}: {failure}")
    if options.quick:
        report.machine["rounds"] = "--quick: too few to quote"
    print(report.table())
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    missed = report.missed()
    print(f"\nbars missed: {', '.join(missed) or 'none'} · rounds one by one: {options.json}")
    return 1 if report.failures or (options.strict and missed) else 0


def _ranges(options: argparse.Namespace) -> int:
    """Record what medians are, or compare them with what they were."""
    names, machine = options.only or ranges.ROWS, describe_machine()

    def measured(name: str) -> Row:
        wait_for_quiet(_QUIET_S)
        row = measure(name, quick=True)
        print(f"{name}: {row.ratio(row.against[0]):.3g}× {row.against[0].label}", flush=True)
        return row

    print("\n".join(f"{key}: {value}" for key, value in machine.items()))
    if options.record_ranges:
        ranges.write(ranges.record(names, measured, machine=machine))
        return 0
    slower = ranges.check(names, measured, ranges.read())
    print("\n".join(slower) or f"nothing is slower than it was, of {len(names)} rows")
    return 1 if slower else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Compare us with our neighbours.")
    parser.add_argument("--quick", action="store_true", help="few rounds: does everything work?")
    parser.add_argument("--only", action="append", choices=sorted(ROWS), help="measure this row; may be repeated")
    parser.add_argument("--json", type=Path, default=Path("build/benchmarks.json"), metavar="FILE")
    parser.add_argument("--record-ranges", action="store_true", help=f"measure {ranges.RUNS} times, and keep it")
    parser.add_argument("--check", action="store_true", help="compare with what was kept; 1 when a row is slower")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a bar is missed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
