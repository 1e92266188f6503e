"""Writes what `tests/e2e/stable` compares with: `python -m tests.e2e.stable.record` (see the package's docstring)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

from tests.e2e.stable import recording, surface


def main() -> int:
    """Write the surface, or record a home; return 1 where the surface would break users and may not."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.stable.record", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["surface", "home"], default="surface")
    parser.add_argument("date", nargs="?", help="of a recorded home: the name of its new folder, as 2026-11")
    parser.add_argument("--breaking", action="store_true", help="write removals and changes of the surface, too")
    words = parser.parse_args()
    if words.what == "home":
        if not words.date:
            parser.error("name the folder to record, as: python -m tests.e2e.stable.record home 2026-11")
        return recording.record(words.date)
    return _write_surface(breaking=words.breaking)


def _write_surface(*, breaking: bool) -> int:
    for name in [name for name in os.environ if name.startswith(("SERVERLESS_GPU_", "SGPU_"))]:
        del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="sg-") as home:
        os.environ.update(SERVERLESS_GPU_HOME=home, SERVERLESS_GPU_PREWARM="0")
        now = surface.current()
    before = surface.read(surface.FILE.read_text(encoding="utf-8")) if surface.FILE.exists() else {}
    found = surface.differences(before, now)
    for difference in found:
        print(("BREAKS  " if difference.breaks else "        ") + difference.text)
    if any(difference.breaks for difference in found) and not breaking:
        print("Nothing was written: lines marked BREAKS take something from users. Keep the old name or field beside")
        print("the new one; or, if that is decided, run: python -m tests.e2e.stable.record --breaking")
        return 1
    surface.FILE.write_text(surface.written(now), encoding="utf-8")
    print(f"{surface.FILE.name}: {sum(map(len, now.values()))} lines in {len(now)} sections")
    return 0


if __name__ == "__main__":
    sys.exit(main())
