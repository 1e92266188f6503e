"""Chooses the checkpoints of the newest earlier attempt that saved a checkpoint, to continue from.

<checkpoints>/<run>/<n>/ holds the checkpoints of attempt n. The directory is empty or missing if attempt n stopped
before it saved a checkpoint. Earlier attempts have certainly ended, so every rank finds the same directory. On several
nodes, the directories may differ. The nodes agree beforehand on the newest attempt whose checkpoints exist on all
nodes. A name that begins with a dot or ends in `.tmp` is an unfinished checkpoint and does not count.
"""

from __future__ import annotations

import os
import sys

AGREED = "SGPU_RESUME_FENCE"


def newest_before(directory: str, agreed: str | None = None) -> str | None:
    """Return the directory of the newest earlier attempt that saved a checkpoint, or None.

    `agreed` is the attempt from which all nodes of a gang continue, or "0" for no attempt. On a single node, `agreed`
    is None.
    """
    run = os.path.dirname(os.path.normpath(directory))
    for fence in saved_before(directory):
        if agreed in (None, str(fence)):
            return os.path.join(run, str(fence))
    return None


def saved_before(directory: str) -> list[int]:
    """Return the numbers of the earlier attempts that saved a checkpoint, newest first."""
    run, own = os.path.split(os.path.normpath(directory))
    earlier = [fence for name in _names(run) if 0 < (fence := _number(name)) < _number(own)]
    return [
        fence for fence in sorted(earlier, reverse=True) if any(map(_is_whole, _names(os.path.join(run, str(fence)))))
    ]


def newest_up_to(directory: str) -> int:
    """Return the number of the newest attempt up to this one that saved a checkpoint, or 0."""
    if any(map(_is_whole, _names(directory))):
        return _number(os.path.basename(os.path.normpath(directory)))
    return max(saved_before(directory), default=0)


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() else 0


def _is_whole(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(".tmp")


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


# The node's uplink runs this module in a separate process, because a network file system may hang.
if __name__ == "__main__":
    sys.stdout.write(str(newest_up_to(sys.argv[1])))
