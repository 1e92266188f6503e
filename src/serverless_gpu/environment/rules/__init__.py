"""What a unit and a snapshot may hold: the one place that says no to what came from somewhere else.

    check_unit      rows (paths, kinds, links) · where their bytes lie (packs, blocks, places) · how much it can become
    check_snapshot  interpreter, roots, members · files that are generated · facts and notes
    check_together  a snapshot with its units: sizes as it says, nothing generated on top of a file, or below one

All of it is pure and linear in the size of the document, and it is done before a byte of content is asked for. A unit
can name regular files, links inside the tree and empty directories, and nothing else: modes, owners, devices, hard
links and times have no place in the format, so they need no rule. On restore a file is 0444 or 0555.

Failure: `EnvironmentRejected` naming the unit or snapshot, the path, and the rule it breaks.
"""

from __future__ import annotations

from collections.abc import Mapping

from serverless_gpu.environment.documents import VERSION, Snapshot, Unit, unit_address
from serverless_gpu.environment.rules.rows import (
    BLOCKS_MAX,
    CONTENT_BYTES_MAX,
    DEPTH_MAX,
    FREE_RATIO_BYTES,
    NAME_BYTES_MAX,
    NOTE_BYTES_MAX,
    NOTE_NAMES,
    PACK_BYTES_MAX,
    PATH_BYTES_MAX,
    RATIO_MAX,
    ROWS_MAX,
    Tree,
    check_blocks,
    check_path,
    check_rows,
    refuse,
)
from serverless_gpu.environment.rules.snapshots import check_snapshot, is_digest

__all__ = [
    "BLOCKS_MAX",
    "CONTENT_BYTES_MAX",
    "DEPTH_MAX",
    "FREE_RATIO_BYTES",
    "NAME_BYTES_MAX",
    "NOTE_BYTES_MAX",
    "NOTE_NAMES",
    "PACK_BYTES_MAX",
    "PATH_BYTES_MAX",
    "RATIO_MAX",
    "ROWS_MAX",
    "check_path",
    "check_rows",
    "check_snapshot",
    "check_together",
    "check_unit",
    "is_digest",
]


def check_unit(unit: Unit) -> None:
    """Check everything a unit says: its address, its rows, and where their bytes lie.

    Args:
        unit: as decoded; nothing of it is believed.

    Raises:
        EnvironmentRejected: it breaks a rule; says which, and where.
    """
    if not is_digest(unit.address):
        refuse("a unit", unit.address, "an address is 64 hexadecimal digits")
    what = f"unit {unit.address[:12]}"
    if unit.version != VERSION:
        refuse(what, "", f"its format is {unit.version!r}, and this program reads {VERSION}")
    for pack in unit.packs:
        if not is_digest(pack):
            refuse(what, pack, "the name of a pack is 64 hexadecimal digits")
    check_rows(unit.rows, what)
    if unit_address(unit.rows) != unit.address:
        refuse(what, "", "its address is not that of its rows")
    check_blocks(unit, what)


def check_together(snapshot: Snapshot, units: Mapping[str, Unit]) -> None:
    """Check a snapshot against its units, both already checked by themselves.

    Raises:
        EnvironmentRejected: a unit is not as large as the snapshot says, or a generated file or a note would lie on top
            of a row, or below a file.
    """
    what = f"snapshot {snapshot.address[:12]}"
    for index, root in enumerate(snapshot.roots):
        tree = Tree(what)
        texts = {file.path for file in root.generated}
        if index < len(snapshot.facts.notes):
            texts |= snapshot.facts.notes[index].keys()
        for path in sorted(texts):
            tree.add(path, "f")
        for member in root.members:
            unit = units[member.address]
            content = [row.size for row in unit.rows if row.has_content]
            if (member.size, member.files) != (sum(content), len(content)):
                refuse(what, member.name or member.address[:12], "size and number of files are not those of its unit")
            for row in unit.rows:
                # Units may share directories, and even files (then the order of layers decides): only generated
                # files are looked for.
                tree.meet(row.path, row.kind)
