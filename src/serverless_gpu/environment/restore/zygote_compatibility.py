"""Whether an interpreter that was started in one environment can go on in another: a pure question about two snapshots.

    loaded: names, files ─┐
    old snapshot ─────────┼─▶ fits(…) ─▶ "" (yes: mount the new one over the old) or why not, in words
    new snapshot ─────────┘

What an interpreter has imported stays in it. So it fits an environment that has the same of everything it imported, in
which no other unit provides a name it imported, and whose start-up would have run the same code. What it never
imported may change, come and go: modules and metadata are looked up when they are asked for.

What a snapshot says of its units beside their addresses (names, modules) is for people: addresses do not cover it.

It looks at no files: `UnitFindings` says what was seen in them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from serverless_gpu.environment.documents import Root, Snapshot, SnapshotMember
from serverless_gpu.environment.restore.assembly import library_name


class LoadedModules(msgspec.Struct, frozen=True, kw_only=True):
    """What an interpreter has of its environment."""

    names: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()  # files of its modules and libraries, absolute
    libraries_known: bool = True  # whether the libraries are among them: not where the system does not say


class UnitFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen in the units that only one of two environments has, by their addresses."""

    used: Collection[str] = ()
    hooks: Mapping[str, str] = {}  # those whose code runs by itself, and when
    names: Mapping[str, Collection[str]] = {}


def fits(loaded: LoadedModules, old: Snapshot, new: Snapshot, units: UnitFindings) -> str:
    """Return why an interpreter of one environment cannot be used for another, or "" when it can."""
    mine, theirs = old.interpreter, new.interpreter
    if (mine.implementation, mine.abi, mine.platform, mine.minor) != (
        theirs.implementation,
        theirs.abi,
        theirs.platform,
        theirs.minor,
    ):
        return f"its interpreter is {theirs.implementation} {theirs.version}, the warm one {mine.version}"
    if not loaded.libraries_known:
        return "it is not known which libraries the warm interpreter has loaded"
    if [_shape(root) for root in old.roots] != [_shape(root) for root in new.roots]:
        return "other directories are on its path"
    for before, after in zip(old.roots, new.roots, strict=True):
        problem = _root_problem(loaded, before, after, units)
        if problem:
            return problem
    return ""


def changed_units(old: Snapshot, new: Snapshot) -> frozenset[str]:
    """Return the addresses of units that only one of two environments has at a place."""
    changed: set[str] = set()
    for before, after in zip(old.roots, new.roots, strict=False):
        gone, come = _difference(before, after)
        changed |= {member.address for member in (*gone, *come)}
    return frozenset(changed)


def row_of(snapshot: Snapshot, tree: str, file: str) -> tuple[int, str] | None:
    """Return the root and the row's path of a file in a restored environment, or None for what is not of a unit."""
    if not file.startswith(f"{tree}/"):
        return None
    library = f"lib/{library_name(snapshot.interpreter)}/site-packages/"
    inner = file[len(tree) + 1 :]
    first, _, rest = inner.partition("/")
    number, _, below = rest.partition("/")
    if first == "code" and number.isdigit():
        return int(number), f"site/{below}"
    root = 0
    if first == "roots" and number.isdigit():
        root, inner = int(number), below
    if inner.startswith(library):
        return root, f"site/{inner[len(library) :]}"
    return root, f"prefix/{inner}"


def _shape(root: Root) -> tuple[str, bool]:
    return root.kind, root.before


def _root_problem(loaded: LoadedModules, old: Root, new: Root, units: UnitFindings) -> str:
    gone, come = _difference(old, new)
    if old.generated != new.generated:
        names = sorted({file.path for file in set(old.generated) ^ set(new.generated)})
        return f"{names[0].partition('/')[2]} is another one"
    for member in gone:
        if member.address in units.used:
            return f"{_text(member)}, which it has loaded, {_fate(member, come)}"
    for member in (*gone, *come):
        if member.address in units.hooks:
            return f"{_text(member)} runs code when {units.hooks[member.address]}"
    for member in come:
        # Code of the project's own is compared by file, name by name: the caller says what it imports from there.
        taken = sorted(loaded.names.intersection(units.names[member.address])) if new.kind != "code" else []
        if taken:
            return f"{_text(member)} brings {taken[0]}, which it has loaded from elsewhere"
    return ""


def _difference(old: Root, new: Root) -> tuple[tuple[SnapshotMember, ...], tuple[SnapshotMember, ...]]:
    """Return the units that only the old, and that only the new one has."""
    return _without(old.members, new.members), _without(new.members, old.members)


def _without(members: Iterable[SnapshotMember], others: Iterable[SnapshotMember]) -> tuple[SnapshotMember, ...]:
    addresses = {member.address for member in others}
    return tuple(member for member in members if member.address not in addresses)


def _text(member: SnapshotMember) -> str:
    if member.kind == "code":
        return f"the code in {member.name}"
    if member.kind == "unowned":
        return "what no distribution owns"
    return f"{member.name} {member.version}".strip()


def _fate(member: SnapshotMember, come: Iterable[SnapshotMember]) -> str:
    for other in come:
        if (other.kind, other.name) == (member.kind, member.name):
            return "has changed" if other.version == member.version else f"is {other.version} now"
    return "is not there any more"
