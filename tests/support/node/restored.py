"""Helpers of the tests of restored that other tests use as well."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.environment.documents import Interpreter, Root, SnapshotMember, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.restore.restore import RestoredTree
from serverless_gpu.environment.restore.trees import Mount
from serverless_gpu.node.agent.environments import RestoredEnvironment
from serverless_gpu.node.base.protocol import Context

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux")
TOY = SnapshotMember(address="ab" + "0" * 62, kind="distribution", name="toy", version="1.0", modules=("toy",))


def environment(directory: Path, mode: str = "overlay", **facts: object) -> RestoredEnvironment:
    project = directory / "project"
    unit, view = directory / "units" / "ab" / TOY.address, directory / "view"
    for path in (project, unit, view):
        path.mkdir(parents=True, exist_ok=True)
    facts = {
        "prefix": "/venv",
        "python": "/usr/bin/python3.11",
        "originals": ("/venv/lib/python3.11/site-packages", str(project)),
        **facts,
    }
    roots = (Root(kind="own", members=(TOY,)), Root(kind="code", members=(), before=True))
    snapshot = make_snapshot(PYTHON, roots, SnapshotOrigin(**facts))  # type: ignore[arg-type]  # written down by hand
    (directory / "trees" / snapshot.address / "overlay").mkdir(parents=True, exist_ok=True)
    restored = RestoredTree(
        address=snapshot.address,
        tree="/view",
        python="/view/bin/python",
        mode="overlay" if mode == "overlay" else "links",
        why="" if mode == "overlay" else "no mounts: refused",
        mounts=(Mount(at=str(view), layers=("0", "1"), directory=str(directory)),) if mode == "overlay" else (),
        fetched_bytes=2_000_000,
        units_fetched=1,
    )
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    return RestoredEnvironment(snapshot, restored, lock, directory)


def caller(directory: Path, **changes: object) -> Context:
    fields: dict[str, object] = {
        "python": "/venv/bin/python3",
        "flags": ("-O",),
        "environ": {"PATH": "/venv/bin:/usr/bin", "VIRTUAL_ENV": "/venv", "PYTHONPATH": "lib::/opt/x", "A": "/venv"},
        "cwd": str(directory / "project"),
        "umask": 0o22,
        "argv": ("train.py",),
        "sys_path": ("", "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages"),
        "packages": {"toy": "/venv/lib/python3.11/site-packages/toy.py", "torch": "", "json": "/usr/lib/json.py"},
        **changes,
    }
    return Context(**fields)  # type: ignore[arg-type]  # written down by hand
