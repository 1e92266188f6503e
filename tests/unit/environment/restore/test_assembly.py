"""Where parts of an environment go, and where its original paths went: pure."""

from __future__ import annotations

import posixpath

import pytest

from serverless_gpu.environment.documents import (
    Generated,
    Interpreter,
    Root,
    Snapshot,
    SnapshotMember,
    SnapshotOrigin,
    make_snapshot,
)
from serverless_gpu.environment.restore.cache.unit_metadata import UnitOutline
from serverless_gpu.environment.restore.tree_plan import AssemblyTarget, assemble, library_name, moved
from tests.support.golden import golden

PYTHON = Interpreter(implementation="cpython", version="3.11.7", abi="cpython-311-x86_64-linux-gnu", platform="linux")
PLACE = AssemblyTarget(tree="/view", base="/usr/bin/python3.11", version="3.11.2")
SITE = "lib/python3.11/site-packages"


def member(address: str, **fields: object) -> SnapshotMember:
    return SnapshotMember(address=address, kind="distribution", **fields)  # type: ignore[arg-type]  # fields of a Member


def snapshot(*roots: Root, facts: SnapshotOrigin | None = None) -> Snapshot:
    return make_snapshot(PYTHON, roots, facts or SnapshotOrigin())


def outline(*areas: str, **fields: object) -> UnitOutline:
    return UnitOutline(size=0, files=0, areas=areas, **fields)  # type: ignore[arg-type]  # fields of an Outline


def test_each_area_of_a_root_is_a_part_and_the_outermost_has_the_interpreter() -> None:
    made = snapshot(
        Root(kind="own", members=(member("a"), member("b"))),
        Root(kind="library", members=(member("c"),)),
        Root(kind="library", members=(member("d"),), before=True),
        Root(kind="code", members=(SnapshotMember(address="e", kind="code"),)),
    )
    outlines = {
        "a": outline("site"),
        "b": outline("prefix", "site"),
        "c": outline("prefix", "site"),
        "d": outline("site"),
        "e": outline("site"),
    }
    parts = assemble(made, outlines, PLACE)
    assert [(part.at, part.area, part.units) for part in parts] == [
        ("", "prefix", ("b",)),
        (SITE, "site", ("a", "b")),
        ("roots/1", "prefix", ("c",)),
        (f"roots/1/{SITE}", "site", ("c",)),
        (f"roots/2/{SITE}", "site", ("d",)),
        ("code/3", "site", ("e",)),
    ]
    assert parts[0].links == {"bin/python": "/usr/bin/python3.11", "bin/python3": "python", "bin/python3.11": "python"}
    assert parts[0].directories == (SITE, f"roots/1/{SITE}", f"roots/2/{SITE}", "code/3")
    assert parts[0].files["pyvenv.cfg"] == (
        b"home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.2\nexecutable = /usr/bin/python3.11\n"
    )
    assert parts[1].files["_sgpu_roots.pth"] == f"/view/roots/1/{SITE}\n/view/code/3\n".encode()


def test_an_exported_tree_puts_early_roots_in_front_itself() -> None:
    made = snapshot(Root(kind="own", members=()), Root(kind="library", members=(), before=True))
    alone = AssemblyTarget(tree="/view", base="/usr/bin/python3.11", version="3.11.2", alone=True)
    text = assemble(made, {}, alone)[1].files["_sgpu_roots.pth"].decode()
    listed = f"['/view/roots/1/{SITE}']"
    assert text == golden("environment.assembly.import-sys-sys", listed=listed)


def test_a_site_directory_is_added_as_one_and_any_other_by_its_path() -> None:
    facts = SnapshotOrigin(
        originals=("/e/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages", "/home/u/target")
    )
    made = snapshot(*(Root(kind="own" if number == 0 else "library", members=()) for number in range(3)), facts=facts)
    text = assemble(made, {}, PLACE)[1].files["_sgpu_roots.pth"].decode()
    assert text == golden("environment.assembly.import-site-site", SITE=SITE)


def test_generated_files_name_the_directories_of_this_tree() -> None:
    files = (
        Generated(path="site/a.pth", text="{{sgpu:1}}/src\n{{sgpu:0}}\n"),
        Generated(path="prefix/bin/run", text="#!{{sgpu:python}}\n{{sgpu:7}}", executable=True),
    )
    made = snapshot(Root(kind="own", members=(), generated=files), Root(kind="code", members=()))
    prefix, site, _ = assemble(made, {}, PLACE)
    assert site.files["a.pth"] == f"/view/code/1/src\n/view/{SITE}\n".encode()
    assert prefix.files["bin/run"] == b"#!/view/bin/python\n{{sgpu:7}}"
    assert prefix.executable == {"bin/run"}


@pytest.mark.parametrize(
    ("abi", "version", "name"),
    [
        ("cpython-311-x86_64-linux-gnu", "3.11.7", "python3.11"),
        ("cpython-313t-x86_64-linux-gnu", "3.13.1", "python3.13t"),
    ],
)
def test_the_directory_of_the_library_is_that_of_the_interpreter(abi: str, version: str, name: str) -> None:
    assert library_name(Interpreter(implementation="cpython", version=version, abi=abi, platform="linux")) == name


ENVIRONMENT = SnapshotOrigin(
    python="/usr/bin/python3.11",
    prefix="/home/u/env",
    originals=("/home/u/env/lib/python3.11/site-packages", "/home/u/env/lib/more", "/home/u/proj", "/home/u/proj/sub"),
)
KINDS = ("own", "library", "code", "code")


@pytest.mark.parametrize(
    ("path", "restored"),
    [
        ("/home/u/env/lib/python3.11/site-packages/torch/x.py", f"/view/{SITE}/torch/x.py"),
        ("/home/u/env/lib/python3.11/site-packages", f"/view/{SITE}"),
        ("/home/u/env/lib/python3.11/site-packages-more", "/view/lib/python3.11/site-packages-more"),
        ("/home/u/env/bin/tool", "/view/bin/tool"),
        ("/home/u/env", "/view"),
        ("/home/u/env/lib/more/m.py", f"/view/roots/1/{SITE}/m.py"),
        ("/home/u/proj/a.py", "/view/code/2/a.py"),
        ("/home/u/proj/sub/b.py", "/view/code/3/b.py"),
        ("/home/u/proj/../proj/a.py", "/view/code/2/a.py"),
        ("/home/u/project/a.py", None),
        ("/home/u", None),
        ("/usr/lib/python3.11/os.py", None),
    ],
)
def test_an_original_path_is_found_in_the_tree_by_the_longest_root(path: str, restored: str | None) -> None:
    made = snapshot(*(Root(kind=kind, members=()) for kind in KINDS), facts=ENVIRONMENT)  # type: ignore[arg-type]  # kinds of roots
    assert moved(made, "/view", path) == restored


@pytest.mark.parametrize("environment", ["/home/u/proj/.venv", "/home/u/proj/python"])
@pytest.mark.parametrize(
    ("path", "restored"),
    [
        ("lib/python3.11/site-packages/a.py", f"/view/{SITE}/a.py"),
        ("/home/u/proj/python/lib/python3.11", None),
        ("/home/u/proj/python/lib/python3.11/wave.py", None),
        ("/home/u/proj/python/lib/python3.11/lib-dynload", None),
        ("/home/u/proj/python/tools/mine.py", "/view/code/1/python/tools/mine.py"),
        ("/home/u/proj/site/mine.py", "/view/code/1/site/mine.py"),
    ],
)
def test_23C8_the_standard_library_of_an_interpreter_in_the_project_does_not_move(
    environment: str, path: str, restored: str | None
) -> None:
    facts = SnapshotOrigin(
        python="/home/u/proj/python/bin/python3.11",
        prefix=environment,
        originals=(f"{environment}/lib/python3.11/site-packages", "/home/u/proj"),
    )
    made = snapshot(Root(kind="own", members=()), Root(kind="code", members=()), facts=facts)
    assert moved(made, "/view", posixpath.join(environment, path)) == restored


@pytest.mark.parametrize(
    ("path", "restored"),
    [
        ("/usr/local/lib/python3.11/site-packages/a.py", f"/view/{SITE}/a.py"),
        ("/usr/local/lib/python3.11/os.py", None),
        ("/usr/local/share/x", "/view/share/x"),
        ("/usr/local", None),
    ],
)
def test_the_standard_library_of_a_global_interpreter_does_not_move(path: str, restored: str | None) -> None:
    facts = SnapshotOrigin(
        python="/usr/local/bin/python3.11",
        prefix="/usr/local",
        originals=("/usr/local/lib/python3.11/site-packages",),
    )
    assert moved(snapshot(Root(kind="own", members=()), facts=facts), "/view", path) == restored
