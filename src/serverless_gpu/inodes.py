"""Whether a disk that answers "no space left" has room, but no inodes: then freeing bytes does not help.

Some file systems make inodes as they go and count none (btrfs); those are never out of them.
"""

from __future__ import annotations

import os
from pathlib import Path

_BYTES_MIN = 1 << 20
_FEW = 8


def lacks_inodes(path: Path) -> bool:
    """Return whether no file can be made on the disk of a path, though there is room for one.

    Args:
        path: of the file or directory that could not be made; it need not be there.
    """
    for directory in (path, *path.parents):
        try:
            disk = os.statvfs(directory)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_favail < _FEW and disk.f_bavail * disk.f_frsize >= _BYTES_MIN
    return False
