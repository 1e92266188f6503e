"""`sgpu env show`, `fingerprint` and `diff`: contents, address and changes of an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from serverless_gpu.ambient import SystemClock, format_moment, format_utc
from serverless_gpu.cli.environments import locations
from serverless_gpu.cli.environments.progress_meter import Meters
from serverless_gpu.cli.output import columns, print_json, say
from serverless_gpu.environment.documents import FileRow, Root, Snapshot, SnapshotMember
from serverless_gpu.environment.scan.changes import Change
from serverless_gpu.environment.scan.changes import differences as differences_of_files
from serverless_gpu.environment.scan.snapshot_composition import LocalUnit
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.errors import EnvironmentMissing
from serverless_gpu.units import format_bytes, format_duration_ms

_PTH_BYTES_MAX = 65_536
Value = TypeVar("Value")
SHORT = 12
"""Number of address digits in the output. A prefix of 12 digits is unique in any realistic store."""
_LARGEST = 10
_NAMED_MAX = 8
_LEFT_OUT_MAX = 20
_CODE_CHARACTERS_MAX = 60


class EnvironmentState(msgspec.Struct, kw_only=True):
    """An environment's current state and last capture."""

    last: Snapshot | None  # Snapshot of the last capture; None before the first capture.
    now: Snapshot
    sources: Mapping[str, LocalUnit]  # Local units by address, or an empty mapping without a scan.
    times: dict[str, int]  # Step durations in milliseconds, by step name.

    @property
    def known(self) -> bool:
        """Return True if the last capture matches the current state."""
        return self.last is not None and self.last.address == self.now.address


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between two snapshots: changed items and environment variables."""

    changes: tuple[Change, ...]
    variables_added: tuple[str, ...] = ()
    variables_removed: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return the differences as human-readable sentences."""
        said = [change.sentence() for change in self.changes]
        said += [f"start-up variable {name} is newly set" for name in self.variables_added]
        return said + [f"start-up variable {name} is no longer set" for name in self.variables_removed]


def show_now(python: str | None, *, as_json: bool, everything: bool) -> None:
    """Print the current environment of an interpreter."""
    look = _current_state(python, read_all=True)
    contents = _contents(look.sources)
    if as_json:
        print_json({"known": look.known, **snapshot_json(look.now, contents)})
        return
    state = (
        captured_text(look.last)
        if look.last is not None and look.known
        else "the current environment has not been captured"
    )
    _print(snapshot_lines(look.now, contents, everything=everything, state=state))


def show_stored(address: str, store: str | None, *, as_json: bool, everything: bool) -> None:
    """Print the contents of a snapshot from a store."""
    blobs = locations.open_blobs(store, locations.environments_directory())
    snapshot = locations.choose_snapshot(address, blobs)
    # Reading all unit documents could send many requests to a remote store. Listing unowned files sends one request for
    # each root.
    wanted = {m.address for root in snapshot.roots for m in root.members if everything or m.kind == "unowned"}
    contents = Contents(rows={one: blobs.read_unit(one).rows for one in sorted(wanted)})
    if as_json:
        print_json({"known": True, **snapshot_json(snapshot, contents)})
        return
    _print(snapshot_lines(snapshot, contents, everything=everything, state=captured_text(snapshot)))


def fingerprint(python: str | None, *, as_json: bool) -> None:
    """Print an environment's address, and its changes since the last capture."""
    look = _current_state(python)
    difference = (
        Difference(changes=())
        if look.last is None
        else _difference(look, locations.open_blobs(None, locations.environments_directory()))
    )
    if as_json:
        last = None if look.last is None else look.last.address
        said = {"address": look.now.address, "known": look.known, "last": last, "changes": difference.changes}
        print_json({**said, "times_ms": look.times})
        return
    lines = [look.now.address]
    if look.last is None:
        lines.append("not known: this environment has no capture. Run `sgpu env capture`")
    elif look.known:
        lines.append(f"known: the environment is unchanged since it was {captured_text(look.last)}")
    else:
        lines.append(f"not known: the environment has changed since it was {captured_text(look.last)}")
        lines += [f"  {sentence}" for sentence in difference.sentences()]
    took = ", ".join(f"{name} {format_duration_ms(ms)}" for name, ms in look.times.items())
    _print([*lines, f"took: {took}"])


def differences(first: str | None, second: str | None, python: str | None, store: str | None, *, as_json: bool) -> bool:
    """Print the differences between environments. Return True if the environments differ."""
    blobs = locations.open_blobs(store, locations.environments_directory())
    old = None if first is None else locations.choose_snapshot(first, blobs)
    if old is not None and second is not None:
        look = EnvironmentState(last=old, now=locations.choose_snapshot(second, blobs), sources={}, times={})
    else:
        look = _current_state(python)
        look.last = old or look.last
    if look.last is None:
        raise EnvironmentMissing(
            "this environment has no capture to compare with",
            hint="capture the environment (`sgpu env capture`), or name a snapshot (`sgpu env diff ADDRESS`)",
        )
    difference = _difference(look, blobs)
    said = difference.sentences()
    if as_json:
        print_json({"old": look.last.address, "new": look.now.address, **msgspec.structs.asdict(difference)})
    else:
        _print(said or ["nothing differs"])
    return bool(said)


def _current_state(python: str | None, *, read_all: bool = False) -> EnvironmentState:
    """Return an environment's current state after checking its files.

    Scan the environment only if a file changed or `read_all` is set.
    """
    times: dict[str, int] = {}
    description = _timed(times, "asking the interpreter", lambda: locations.describe(python))
    recogniser = locations.known_environments(locations.environments_directory())
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
    """Return the differences, with edited files for each unit whose old and new versions are available."""
    assert look.last is not None  # Callers pass a state with a last capture.
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


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    """Known file rows and `.pth` texts of a snapshot."""

    # File rows by unit address. For a unit without file rows, the output shows only the unit's size and file count.
    rows: Mapping[str, tuple[FileRow, ...]] = {}
    texts: Mapping[tuple[str, str], str] = {}  # Texts of `.pth` files, keyed by the unit's address and the row's path.


class Pth(msgspec.Struct, frozen=True, kw_only=True):
    """A `.pth` file in a directory of `sys.path`."""

    file: str
    owner: str = ""  # Name of the distribution that owns the file; "" if no distribution owns it.
    adds: tuple[str, ...] = ()  # Directories that the `.pth` file adds to `sys.path`.
    runs: tuple[str, ...] = ()  # Lines of the `.pth` file that Python executes at every start.
    known: bool = True  # False if the text of the `.pth` file is unavailable.


def snapshot_lines(snapshot: Snapshot, contents: Contents, *, everything: bool, state: str) -> list[str]:
    """Return a snapshot as lines of text. `state` describes the capture."""
    python, count = snapshot.interpreter, sum(_is_distribution(m) for root in snapshot.roots for m in root.members)
    glibc = f", glibc {python.glibc}" if python.glibc else ""
    where = f": {snapshot.facts.python}" if snapshot.facts.python else ""
    total = f"{format_bytes(snapshot.size)}, {_files(snapshot.files)}, {_count_text(count, 'distribution')}"
    lines = [
        f"environment  {snapshot.address}",
        f"             {total}; {state}",
        f"interpreter  {python.implementation} {python.version}, {python.abi}, {python.platform}{glibc}{where}",
    ]
    for number, root in enumerate(snapshot.roots):
        lines += ["", *_root_lines(snapshot, number, root, contents, everything=everything)]
    left_out = snapshot.facts.left_out if everything else snapshot.facts.left_out[:_LEFT_OUT_MAX]
    if left_out:
        lines += ["", "left out:", *(f"  {sentence}" for sentence in left_out)]
    if more := len(snapshot.facts.left_out) - len(left_out):
        lines.append(f"  and {more} more entries (--all lists all entries)")
    if snapshot.facts.variables:
        lines += ["", f"start-up variables (names only): {', '.join(snapshot.facts.variables)}"]
    return lines


def snapshot_json(snapshot: Snapshot, contents: Contents) -> dict[str, object]:
    """Return a snapshot as JSON values."""
    facts = snapshot.facts
    return {
        "address": snapshot.address,
        "captured": format_utc(facts.captured_ns) if facts.captured_ns else None,
        "size_bytes": snapshot.size,
        "files": snapshot.files,
        "interpreter": snapshot.interpreter,
        "python": facts.python,
        "prefix": facts.prefix,
        "roots": [_root_json(snapshot, number, root, contents) for number, root in enumerate(snapshot.roots)],
        "left_out": facts.left_out,
        "variables": facts.variables,
    }


def titles(members: Sequence[SnapshotMember]) -> str:
    """Return the names of the largest units."""
    shown = [_title(member) for member in sorted(members, key=lambda member: -member.size)[:_NAMED_MAX]]
    more = len(members) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def captured_text(snapshot: Snapshot) -> str:
    """Return a snapshot's capture time as text."""
    captured_ns = snapshot.facts.captured_ns
    return f"captured {format_moment(captured_ns)}" if captured_ns else "captured"


def pth_files(snapshot: Snapshot, root: Root, contents: Contents) -> list[Pth]:
    """Return the `.pth` files in one directory of `sys.path`, with their effects."""
    found = [_pth(snapshot, _file(item.path), "", item.text) for item in root.generated if is_pth(item.path)]
    for member in root.members:
        for row in contents.rows.get(member.address, ()):
            if is_pth(row.path):
                text = contents.texts.get((member.address, row.path))
                found.append(_pth(snapshot, _file(row.path), member.name, text))
    return sorted(found, key=lambda one: one.file)


def directory_of(snapshot: Snapshot, number: int) -> str:
    """Return an environment root's original directory, or the root's number if no directory is known."""
    originals = snapshot.facts.originals
    return originals[number] if number < len(originals) and originals[number] else f"root {number}"


def _root_lines(snapshot: Snapshot, number: int, root: Root, contents: Contents, *, everything: bool) -> list[str]:
    size = format_bytes(sum(member.size for member in root.members))
    place = ", before the standard library" if root.before else ""
    kind = {"own": "the interpreter's own", "library": "packages", "code": "code"}[root.kind]
    if root.kind != "code":
        kind += f", {_count_text(sum(_is_distribution(member) for member in root.members), 'distribution')}"
    lines = [f"{directory_of(snapshot, number)}  ({kind}, {size}{place})"]
    named = sorted((m for m in root.members if m.kind != "unowned"), key=lambda member: (-member.size, member.name))
    shown = named if everything else named[:_LARGEST]
    rows = [[_title(m), format_bytes(m.size), _files(m.files), m.address[:SHORT]] for m in shown]
    lines += [f"  {line}" for line in columns(rows)]
    if rest := named[len(shown) :]:
        lines.append(f"  and {len(rest)} smaller, {format_bytes(sum(m.size for m in rest))} (--all lists all units)")
    for member in root.members:
        if member.kind == "unowned":
            lines.append(f"  {_unowned_text(member, contents.rows.get(member.address, ()), everything=everything)}")
    lines += [f"  {line}" for pth in pth_files(snapshot, root, contents) for line in _pth_lines(pth)]
    return lines


def _root_json(snapshot: Snapshot, number: int, root: Root, contents: Contents) -> dict[str, object]:
    unowned = [row.path for m in root.members if m.kind == "unowned" for row in contents.rows.get(m.address, ())]
    return {
        "kind": root.kind,
        "directory": directory_of(snapshot, number),
        "before": root.before,
        "members": root.members,
        "unowned": unowned,
        "generated": [item.path for item in root.generated],
        "pth": pth_files(snapshot, root, contents),
    }


def _title(member: SnapshotMember) -> str:
    if member.kind == "unowned":
        return "files of no distribution"
    name = f"{member.name} {member.version}".rstrip()
    return f"code of {name}" if member.kind == "code" else name


def _unowned_text(member: SnapshotMember, rows: Sequence[FileRow], *, everything: bool) -> str:
    names = [row.path.partition("/")[2] for row in rows]
    shown = names if everything else names[:_NAMED_MAX]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    listed = f": {', '.join(shown)}{more}" if shown else ""
    return f"{_files(member.files)} of no distribution, {format_bytes(member.size)}{listed}"


def _pth_lines(pth: Pth) -> list[str]:
    owner = f" (of {pth.owner})" if pth.owner else ""
    if not pth.known:
        return [f"{pth.file}{owner}"]
    lines = [f"{pth.file}{owner} adds {directory}" for directory in pth.adds]
    for code in pth.runs:
        shown = code if len(code) <= _CODE_CHARACTERS_MAX else code[: _CODE_CHARACTERS_MAX - 1] + "…"
        lines.append(f"{pth.file}{owner} runs this code at every start: {shown}")
    return lines or [f"{pth.file}{owner} adds nothing"]


def _pth(snapshot: Snapshot, file: str, owner: str, text: str | None) -> Pth:
    if text is None:
        return Pth(file=file, owner=owner, known=False)
    for number in range(len(snapshot.roots)):
        text = text.replace(f"{{{{sgpu:{number}}}}}", directory_of(snapshot, number))
    said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    runs = tuple(line for line in said if line.startswith(("import ", "import\t")))
    return Pth(file=file, owner=owner, adds=tuple(line for line in said if line not in runs), runs=runs)


def is_pth(path: str) -> bool:
    """Return True for a `.pth` file, which Python reads at every start."""
    return path.startswith("site/") and path.count("/") == 1 and path.endswith(".pth")


def _is_distribution(member: SnapshotMember) -> bool:
    return member.kind == "distribution"


def _file(path: str) -> str:
    return path.rpartition("/")[2]


def _files(count: int) -> str:
    return _count_text(count, "file")


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
