"""A snapshot as text and as JSON: largest first, `.pth` files in words, what was left out."""

from __future__ import annotations

import msgspec

from serverless_gpu.cli.environments.show import Contents, snapshot_json, snapshot_lines
from serverless_gpu.environment.documents import (
    FileRow,
    Generated,
    Interpreter,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
)
from tests.support.golden import golden

PYTHON = Interpreter(
    implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux-x86_64"
)
TORCH = SnapshotMember(
    address="a" * 64, kind="distribution", name="torch", version="2.13.0", size=700_000_000, files=12_251
)
SMALL = tuple(
    SnapshotMember(address=f"{n:064x}", kind="distribution", name=f"p{n:02}", version="1", size=n, files=1)
    for n in range(12)
)
UNOWNED = SnapshotMember(address="c" * 64, kind="unowned", size=120, files=2)
CODE = SnapshotMember(address="d" * 64, kind="code", name="project", size=2_000, files=3)
OWN = Root(
    kind="own",
    members=(*SMALL, TORCH, UNOWNED),
    generated=(Generated(path="site/editable.pth", text="{{sgpu:1}}\n"),),
)
FACTS = SnapshotOrigin(
    captured_ns=1_790_000_000_000_000_000,
    python="/usr/bin/python3.11",
    originals=("/venv/lib/python3.11/site-packages", "/home/ada/project"),
    variables=("OMP_NUM_THREADS", "PYTHONPATH"),
    left_out=("data/ (its .gitignore)",),
)
SNAPSHOT = make_snapshot(PYTHON, (OWN, Root(kind="code", members=(CODE,), before=True)), FACTS)
CONTENTS = Contents(
    rows={UNOWNED.address: (FileRow("site/hook.pth"), FileRow("site/alone.py"))},
    texts={(UNOWNED.address, "site/hook.pth"): "# why\nimport hook; hook.start()\n/opt/more\n"},
)


def test_the_largest_units_the_unowned_files_and_what_pth_files_do() -> None:
    lines = snapshot_lines(SNAPSHOT, CONTENTS, everything=False, state="not captured")
    assert lines == [
        f"environment  {SNAPSHOT.address}",
        golden("environment.env_described.700-mb-12"),
        golden("environment.env_described.interpreter-cpython-11"),
        "",
        golden("environment.env_described.venv-lib-python3"),
        golden("environment.env_described.torch-13-700"),
        *(f"  p{n:02} 1         {f'{n} B':<8}  1 file        000000000000" for n in range(11, 2, -1)),
        golden("environment.env_described.smaller-all"),
        golden("environment.env_described.files-distribution-120"),
        "  editable.pth adds /home/ada/project",
        "  hook.pth adds /opt/more",
        golden("environment.env_described.hook-pth-runs"),
        "",
        golden("environment.env_described.home-ada-project"),
        golden("environment.env_described.code-project-kb"),
        "",
        "left out:",
        "  data/ (its .gitignore)",
        "",
        golden("environment.env_described.start-up-variables"),
    ]


def test_everything_is_named_when_asked_for() -> None:
    text = "\n".join(snapshot_lines(SNAPSHOT, CONTENTS, everything=True, state=""))
    assert "p00 1" in text and "--all" not in text


def test_a_long_list_of_what_was_left_out_is_cut_and_says_so() -> None:
    facts = msgspec.structs.replace(FACTS, left_out=tuple(f"data/{n}" for n in range(25)))
    lines = snapshot_lines(msgspec.structs.replace(SNAPSHOT, facts=facts), CONTENTS, everything=False, state="")
    assert "  data/19" in lines and "  data/20" not in lines
    assert golden("environment.env_described.more-all-lists") in lines


def test_what_is_not_at_hand_is_left_out_and_not_guessed() -> None:
    bare = make_snapshot(PYTHON, (Root(kind="own", members=(UNOWNED,)),), SnapshotOrigin())
    assert snapshot_lines(bare, Contents(), everything=False, state="captured")[4:] == [
        golden("environment.env_described.root-interpreter-own"),
        golden("environment.env_described.files-distribution-120-2"),
    ]
    unread = Contents(rows={UNOWNED.address: (FileRow("site/hook.pth"),)})
    assert snapshot_lines(bare, unread, everything=False, state="")[-1] == "  hook.pth"


def test_json_has_every_unit_and_every_pth_file() -> None:
    shown = msgspec.json.decode(msgspec.json.encode(snapshot_json(SNAPSHOT, CONTENTS)))
    assert (shown["address"], shown["size_bytes"], shown["captured"]) == (
        SNAPSHOT.address,
        SNAPSHOT.size,
        "2026-09-21T14:13:20Z",
    )
    own, code = shown["roots"]
    assert len(own["members"]) == 14 and own["unowned"] == ["site/hook.pth", "site/alone.py"]
    assert own["pth"][1] == {
        "file": "hook.pth",
        "owner": "",
        "adds": ["/opt/more"],
        "runs": ["import hook; hook.start()"],
        "known": True,
    }
    assert (code["directory"], code["before"]) == ("/home/ada/project", True)


def test_a_snapshot_of_nothing_is_described() -> None:
    nothing: Snapshot = make_snapshot(PYTHON, (), SnapshotOrigin())
    assert snapshot_lines(nothing, Contents(), everything=False, state="x")[1] == golden(
        "environment.env_described.files-distributions"
    )
