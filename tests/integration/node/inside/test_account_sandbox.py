"""A sandbox with the uid, the groups and the home directory of an account of the operating system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.processes.spawn import load_inside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make sandboxes")

UID, GID, GROUP, OTHER_GROUP = 1_899_999_990, 1_899_999_991, 1_899_999_992, 1_899_999_993
LOOK = """\
import json, os
def reads(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return type(error).__name__
with open(f"{home}/written", "w") as file:
    file.write("by the account")
found = {{
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "shared": [reads(f"{home}/group"), reads(f"{home}/other")],
    "beside": os.listdir(os.path.dirname("{home}")),
    "passwd": [line for line in reads("/etc/passwd").splitlines() if line.startswith("ana:")],
}}
os.write(1, json.dumps(found).encode())
"""


def test_27_an_account_keeps_its_groups_and_sees_its_home_at_its_own_path() -> None:
    with tempfile.TemporaryDirectory(prefix="sg-account-", dir="/var/tmp") as place:
        os.chmod(place, 0o711)
        home, at = Path(place, "homes", "ana"), Path(place, "root")
        for directory in (home, at, home.parent / "bob"):
            directory.mkdir(parents=True)
        os.chown(home, UID, GID)
        for name, gid in (("group", GROUP), ("other", OTHER_GROUP)):
            (home / name).write_text(name)
            os.chown(home / name, 0, gid)
            (home / name).chmod(0o640)
        view = View(
            uid=UID,
            at=str(at),
            home=str(home),
            python=sys.executable,
            shown=[],
            devices=[],
            gid=GID,
            groups=(GROUP,),
            user="ana",
            home_at=str(home),
        )
        program = (
            f"{load_inside()}from _sgpu_inside import sandbox\nsandbox.enter(sandbox.View(*{tuple(view)!r}), ())\n"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program + LOOK.format(home=home)],
            capture_output=True,
            check=True,
            timeout=30,
        )
        found = json.loads(done.stdout)
        assert found == {
            "ids": [UID, GID, [GROUP]],
            "shared": ["group", "PermissionError"],
            "beside": ["ana"],
            "passwd": [f"ana:x:{UID}:{GID}::{home}:/bin/sh"],
        }
        written = (home / "written").stat()
        assert (written.st_uid, written.st_gid) == (UID, GID)
