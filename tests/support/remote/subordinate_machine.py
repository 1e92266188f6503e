"""A node of an account without rights and without a spawner of root: it has subordinate ids only.

The files /etc/passwd, /etc/subuid and /etc/subgid of the machine stay as they are. The node sees changed copies in a
mount namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from serverless_gpu.node.inside import mounts, own_uid
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.uplink.server import UplinkProfile
from tests.support.remote.account_machine import AccountMachine

NAME = "tia"
_PR_SET_DUMPABLE = 4
UID = 1_899_700_000 + os.getpid() % 100_000  # Another account in each process of the tests.
FIRST = 1_600_000_000 + os.getpid() % 100_000 * 1_024
COUNT = 1_024
GIDS_FIRST = FIRST + 500
"""The first gid differs from the first uid, as it can on machines with several accounts."""
UIDS = range(FIRST + COUNT // 2, FIRST + COUNT)


def files(home: Path) -> dict[str, str]:
    """Return the texts of the files in /etc that describe the account."""
    return {
        "passwd": f"{Path('/etc/passwd').read_text()}{NAME}:x:{UID}:{UID}::{home}:/bin/sh\n",
        "subuid": f"{NAME}:{FIRST}:{COUNT}\n",
        "subgid": f"{NAME}:{GIDS_FIRST}:{COUNT}\n",
    }


def become_account(view: View, texts: Mapping[str, str]) -> None:
    """Make this process a process of the account, which may execute setuid programs."""
    mounts.unshare(mounts.CLONE_NEWNS)
    mounts.keep_mounts_in(private=True)
    own_uid._show(view)
    for name, text in texts.items():
        with tempfile.NamedTemporaryFile("w", prefix="sg-etc-") as file:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o644)
            tree = mounts.clone_tree(file.name)
            mounts.attach(tree, f"/etc/{name}")
            os.close(tree)
    os.setgroups([])
    os.setresgid(view.uid, view.uid, view.uid)
    os.setresuid(view.uid, view.uid, view.uid)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


class SubordinateMachine(AccountMachine):
    """A node of the account. `texts` replaces files of `files`."""

    def __init__(self, profile: UplinkProfile, *, gpus: int, texts: Mapping[str, str] | None = None) -> None:
        super().__init__(profile, gpus=gpus, spawner=None, uid=UID)
        self._texts = files(self.root) | dict(texts or {})

    @property
    def place(self) -> Path:
        """Return the directory of the principals' homes."""
        return self.root / ".local/share/serverless-gpu/principals"

    def become(self, view: View) -> None:
        become_account(view, self._texts)
