"""Finds the newest earlier attempt with a checkpoint, from which a new attempt continues.

<checkpoints>/<run>/<n>/ holds the checkpoints of attempt n. If attempt n stopped before it saved a checkpoint, the
directory of attempt n is empty or missing. Every rank of a node finds the same directory, because all earlier attempts
have ended. The nodes of a gang may have different checkpoint directories. Before a gang starts, its nodes agree on the
newest attempt with checkpoints on all nodes. Names that begin with a dot or end in `.tmp` denote unfinished
checkpoints, which this module ignores.
"""

from __future__ import annotations

import os
import sys

AGREED = "SGPU_RESUME_FENCE"


def newest_before(directory: str, agreed: str | None = None) -> str | None:
    """Return the directory of the newest earlier attempt that saved a checkpoint, or None.

    `agreed` is the number of the attempt that all nodes of a gang continue from, or "0" for no attempt. On a single
    node, `agreed` is None.
    """
    run = os.path.dirname(os.path.normpath(directory))
    for fence in saved_before(directory):
        if agreed in (None, str(fence)):
            return os.path.join(run, str(fence))
    return None


def saved_before(directory: str) -> list[int]:
    """Return the numbers of earlier attempts that saved a checkpoint, newest first."""
    run, own = os.path.split(os.path.normpath(directory))
    earlier = [fence for name in _names(run) if 0 < (fence := _number(name)) < _number(own)]
    return [
        fence for fence in sorted(earlier, reverse=True) if any(map(_is_whole, _names(os.path.join(run, str(fence)))))
    ]


def newest_up_to(directory: str) -> int:
    """Return the number of the newest attempt with a checkpoint, including this attempt, or 0."""
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
