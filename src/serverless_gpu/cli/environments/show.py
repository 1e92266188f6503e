"""`sgpu env show`, `fingerprint` and `diff`: the contents of an environment, its address, its changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.cli.environments import locations
from serverless_gpu.cli.environments.progress_meter import Meters
from serverless_gpu.cli.environments.snapshot_text import Contents, captured_text, described, is_pth, snapshot_json
from serverless_gpu.cli.output import print_json, say
from serverless_gpu.environment.differences import differences as differences_of_files
from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.scan.changes import Change
from serverless_gpu.environment.scan.scan import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentMissing
from serverless_gpu.units import format_duration_ms

_PTH_BYTES_MAX = 65_536

Value = TypeVar("Value")


class EnvironmentState(msgspec.Struct, kw_only=True):
    """An environment as it is now, and its last capture."""

    last: Snapshot | None  # None before the first capture
    now: Snapshot
    sources: Mapping[str, LocalUnit]  # by address of the unit; empty when no file was read
    times: dict[str, int]  # milliseconds by name of the step

    @property
    def known(self) -> bool:
        """Return whether the last capture is still accurate."""
        return self.last is not None and self.last.address == self.now.address


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between two snapshots: changes of addressed items, and names of variables."""

    changes: tuple[Change, ...]
    variables_added: tuple[str, ...] = ()
    variables_removed: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return it for people."""
        said = [change.sentence() for change in self.changes]
        said += [f"start-up variable {name} is set now" for name in self.variables_added]
        return said + [f"start-up variable {name} is not set any more" for name in self.variables_removed]


def show_now(python: str | None, *, as_json: bool, everything: bool) -> None:
    """Print an interpreter's environment as it is now."""
    look = _look(python, read_all=True)
    contents = _contents(look.sources)
    if as_json:
        print_json({"known": look.known, **snapshot_json(look.now, contents)})
        return
    state = captured_text(look.last) if look.last is not None and look.known else "not captured as it is now"
    _print(described(look.now, contents, everything=everything, state=state))


def show_stored(address: str, store: str | None, *, as_json: bool, everything: bool) -> None:
    """Show a snapshot of a store."""
    blobs = locations.blobs(store, locations.environments())
    snapshot = locations.choose_snapshot(address, blobs)
    # Documents of all units may be many and far away; those of unowned files are one for each root.
    wanted = {m.address for root in snapshot.roots for m in root.members if everything or m.kind == "unowned"}
    contents = Contents(rows={one: blobs.read_unit(one).rows for one in sorted(wanted)})
    if as_json:
        print_json({"known": True, **snapshot_json(snapshot, contents)})
        return
    _print(described(snapshot, contents, everything=everything, state=captured_text(snapshot)))


def fingerprint(python: str | None, *, as_json: bool) -> None:
    """Print an environment's address, whether it was known, and its changes if not."""
    look = _look(python)
    difference = (
        Difference(changes=())
        if look.last is None
        else _difference(look, locations.blobs(None, locations.environments()))
    )
    if as_json:
        last = None if look.last is None else look.last.address
        said = {"address": look.now.address, "known": look.known, "last": last, "changes": difference.changes}
        print_json({**said, "times_ms": look.times})
        return
    lines = [look.now.address]
    if look.last is None:
        lines.append("not known: it was never captured from this home and directory; `sgpu env capture` does it")
    elif look.known:
        lines.append(f"known: nothing changed since it was {captured_text(look.last)}")
    else:
        lines.append(f"not known: it differs from what was {captured_text(look.last)}")
        lines += [f"  {sentence}" for sentence in difference.sentences()]
    took = ", ".join(f"{name} {format_duration_ms(ms)}" for name, ms in look.times.items())
    _print([*lines, f"took: {took}"])


def differences(first: str | None, second: str | None, python: str | None, store: str | None, *, as_json: bool) -> bool:
    """Print the differences; return whether there are any."""
    blobs = locations.blobs(store, locations.environments())
    old = None if first is None else locations.choose_snapshot(first, blobs)
    if old is not None and second is not None:
        look = EnvironmentState(last=old, now=locations.choose_snapshot(second, blobs), sources={}, times={})
    else:
        look = _look(python)
        look.last = old or look.last
    if look.last is None:
        raise EnvironmentMissing(
            "this environment was never captured from this home and directory: there is nothing to compare it with",
            hint="`sgpu env capture` captures it; `sgpu env diff ADDRESS` compares it with a snapshot",
        )
    difference = _difference(look, blobs)
    said = difference.sentences()
    if as_json:
        print_json({"old": look.last.address, "new": look.now.address, **msgspec.structs.asdict(difference)})
    else:
        _print(said or ["nothing differs"])
    return bool(said)


def _look(python: str | None, *, read_all: bool = False) -> EnvironmentState:
    """Check an environment's files, and scan it when something is new or `read_all` is set."""
    times: dict[str, int] = {}
    description = _timed(times, "asking the interpreter", lambda: locations.describe(python))
    recogniser = locations.recogniser(locations.environments())
    last = recogniser.last(description)
    if not read_all:
        same = _timed(times, "gate", lambda: recogniser.gate(description))
        if same is not None and not _timed(times, "every file", recogniser.check):
            return EnvironmentState(last=last, now=same, sources={}, times=times)
    with Meters() as meters:
        scan = _timed(times, "scan", lambda: recogniser.scan(description, meters.report))
    return EnvironmentState(last=last, now=scan.snapshot, sources=scan.sources, times=times)


def _timed(times: dict[str, int], name: str, work: Callable[[], Value]) -> Value:
    clock = SystemClock()
    began_ns = clock.boottime_ns()
    value = work()
    times[name] = (clock.boottime_ns() - began_ns) // 1_000_000
    return value


def _difference(look: EnvironmentState, blobs: StoreBlobs) -> Difference:
    """Return the differences, with the files of edited units as far as both versions are available."""
    assert look.last is not None  # the callers see to it
    changes = differences_of_files(look.last, look.now, look.sources, blobs)
    before, after = set(look.last.facts.variables), set(look.now.facts.variables)
    return Difference(
        changes=changes,
        variables_added=tuple(sorted(after - before)),
        variables_removed=tuple(sorted(before - after)),
    )


def _contents(sources: Mapping[str, LocalUnit]) -> Contents:
    texts = {}
    for address, source in sources.items():
        files = iter(source.files)
        for number, row in enumerate(source.rows):
            file = next(files) if row.has_content else ""
            if is_pth(row.path) and file:
                with open(file, "rb") as opened:
                    text = source.texts.get(number, opened.read(_PTH_BYTES_MAX))
                texts[address, row.path] = text.decode(errors="replace")
    return Contents(rows={address: source.rows for address, source in sources.items()}, texts=texts)


def _print(lines: list[str]) -> None:
    for line in lines:
        say(line)
