"""A restored environment imports what the captured one did, with mounts where the machine can and with links always."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import Generated, Snapshot, SnapshotOrigin, make_snapshot
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoredTree, RestoreMethod, glibc, restore
from serverless_gpu.environment.restore.trees import LAYERS_MAX
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.stores.directory_store import DirectoryStore
from serverless_gpu.errors import EnvironmentMissing, EnvironmentRejected, EnvironmentUnsupported
from tests.support.environment.made_environments import (
    Counting,
    Executable,
    Folder,
    Link,
    Made,
    base_python,
    interpreter,
)
from tests.support.environment.restored_process import MODES, NOBODY, ask, command, public_directory, run
from tests.support.golden import golden

SYSTEM_PYTHON = Path("/usr/bin/python3")
ALPHA_POINTS = """
[console_scripts]
alpha = alpha.cli:main
Alpha.Two = alpha.cli:group.second [extra]

[gui_scripts]
alpha-window = alpha.cli:main

[alpha.plugins]
one = alpha:plugin
"""
ALPHA_CLI = """
import sys
def main():
    print("alpha", sys.argv[0].rpartition("/")[2], *sys.argv[1:])
class group:
    @staticmethod
    def second():
        print("second")
"""


@pytest.fixture(scope="module")
def made() -> Made:
    return Made(StoreBlobs(Counting()))


@pytest.fixture
def cache(tmp_path: Path) -> UnitCache:
    return UnitCache(tmp_path / "environments")


@pytest.fixture(scope="module")
def zoo(made: Made) -> Snapshot:
    """Everything a real environment has, in small."""
    alpha = made.distribution(
        "alpha",
        {
            "site/alpha/__init__.py": "plugin = 'plugged'\n",
            "site/alpha/cli.py": ALPHA_CLI,
            "site/alpha/data/words.txt": "words",
            "site/alpha/alias.txt": Link("data/words.txt"),
            "site/alpha/empty": Folder(),
            "prefix/share/alpha/readme.txt": "read me",
            "prefix/bin/alpha-old": Executable("#!python\nimport alpha\nprint('old', alpha.plugin)\n"),
            "prefix/bin/alpha-native": Executable("#!/bin/sh\necho native\n"),
        },
        points=ALPHA_POINTS,
    )
    spaces = [
        made.distribution(f"space-{name}", {f"site/space/{name}/__init__.py": f"name = {name!r}\n"})
        for name in ("one", "two")
    ]
    by_hand = Executable("#!python\nimport loose\nprint('by hand', loose.x)\n")
    loose = made.piece(
        {
            "site/loose.py": "x = 1\n",
            "site/more.pth": "more\n",
            "site/more/deep.py": "y = 2\n",
            "prefix/bin/by-hand": by_hand,
        }
    )
    own = made.root(
        [alpha, *spaces, loose],
        generated=[
            Generated(path="site/__editable__.project.pth", text="{{sgpu:3}}\n"),
            Generated(path="prefix/bin/told", text="#!/bin/sh\nexec {{sgpu:python}} -c 'print(42)'\n", executable=True),
        ],
    )
    before = made.root([made.piece({"site/early.py": "z = 3\n"})], "library", before=True)
    library = made.root(
        [
            made.distribution("beta", {"site/beta.py": "b = 4\n", "prefix/share/beta/b.txt": "b"}),
            made.piece({"site/beta-path.pth": "import sys; sys.beta_path = 1\n"}),
        ],
        "library",
    )
    code = made.root([made.piece({"site/project/__init__.py": "p = 5\n"}, "code", "project")], "code")
    facts = SnapshotOrigin(
        python=base_python(),
        prefix="/home/someone/env",
        originals=(
            f"/home/someone/env/lib/python{interpreter().minor}/site-packages",
            "/home/someone/early",
            "/usr/lib/python3/dist-packages",
            "/home/someone/project/src",
        ),
        notes=({"site/alpha-1.0.dist-info/INSTALLER": "uv\n", "site/alpha-1.0.dist-info/REQUESTED": ""},),
        loaded=(("site/alpha/__init__.py",), (), (), ("site/project/__init__.py",)),
    )
    return made.snapshot([own, before, library, code], facts=facts)


@pytest.fixture(params=MODES)
def restored(request: pytest.FixtureRequest, zoo: Snapshot, made: Made, cache: UnitCache) -> RestoredTree:
    way = RestoreMethod(mode=request.param, why="a test asks for links" if request.param == "links" else "")
    return restore(zoo.address, made.blobs, cache, way=way)


def test_modules_are_imported_from_the_tree_in_the_order_of_the_original(restored: RestoredTree) -> None:
    code = """
import sys, sysconfig, site
import alpha, space.one, space.two, loose, more, deep, beta, project
answer = [
    sys.path[1:], sys.prefix, sys.base_prefix != sys.prefix, sysconfig.get_path("purelib"),
    sysconfig.get_path("scripts"),
    [m.__file__ for m in (alpha, space.one, space.two, loose, deep, beta, project)], site.ENABLE_USER_SITE,
    sys.beta_path, list(space.__path__),
]
"""
    path, prefix, is_environment, purelib, scripts, files, user_site, beta_path, space = ask(restored, code)
    tree, python = restored.tree, f"python{interpreter().minor}"
    site = f"{tree}/lib/{python}/site-packages"
    ours = [site, f"{tree}/code/3", f"{tree}/roots/2/lib/{python}/site-packages", f"{site}/more"]
    assert [entry for entry in path if entry.startswith(tree)] == ours
    assert path[-len(ours) :] == ours
    assert (prefix, is_environment, purelib, scripts) == (tree, True, site, f"{tree}/bin")
    assert files == [
        f"{site}/alpha/__init__.py",
        f"{site}/space/one/__init__.py",
        f"{site}/space/two/__init__.py",
        f"{site}/loose.py",
        f"{site}/more/deep.py",
        f"{tree}/roots/2/lib/{python}/site-packages/beta.py",
        f"{tree}/code/3/project/__init__.py",
    ]
    assert user_site is False
    assert beta_path == 1
    assert space == [f"{site}/space"]


def test_a_root_before_the_standard_library_is_named_and_not_on_the_path(restored: RestoredTree) -> None:
    assert restored.before == (f"{restored.tree}/roots/1/lib/python{interpreter().minor}/site-packages",)
    code = "import sys, early; answer = [sys.path.index(p) for p in sys.path if 'roots/1' in p] + [early.z]"
    assert ask(restored, code, PYTHONPATH=":".join(restored.before)) == [1, 3]


def test_metadata_is_what_an_installer_leaves(restored: RestoredTree) -> None:
    code = """
import base64, hashlib
from importlib import metadata
alpha = metadata.distribution("alpha")
def right(file):
    path = file.locate()
    digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).rstrip(b"=").decode()
    return (file.hash.value, file.size) == (digest, path.stat().st_size)
answer = {
    "versions": sorted((d.metadata["Name"], d.version) for d in metadata.distributions()),
    "plugins": [p.load() for p in metadata.entry_points(group="alpha.plugins")],
    "files": sorted(map(str, alpha.files)),
    "wrong": [str(f) for f in alpha.files if f.hash and not right(f)],
    "without": [str(f) for f in alpha.files if not f.hash],
    "installer": alpha.read_text("INSTALLER"),
}
"""
    answer = ask(restored, code)
    assert answer["versions"] == [["alpha", "1.0"], ["beta", "1.0"], ["space-one", "1.0"], ["space-two", "1.0"]]
    assert answer["plugins"] == ["plugged"]
    assert answer["files"] == [
        "../../../bin/Alpha.Two",
        "../../../bin/alpha",
        "../../../bin/alpha-native",
        "../../../bin/alpha-old",
        "../../../bin/alpha-window",
        "../../../share/alpha/readme.txt",
        "alpha-1.0.dist-info/INSTALLER",
        "alpha-1.0.dist-info/METADATA",
        "alpha-1.0.dist-info/RECORD",
        "alpha-1.0.dist-info/REQUESTED",
        "alpha-1.0.dist-info/WHEEL",
        "alpha-1.0.dist-info/entry_points.txt",
        "alpha/__init__.py",
        "alpha/cli.py",
        "alpha/data/words.txt",
    ]
    assert answer["wrong"] == []
    assert answer["without"] == ["alpha-1.0.dist-info/RECORD"]
    assert answer["installer"] == "uv\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("alpha", "alpha alpha x"),
        ("alpha-window", "alpha alpha-window x"),
        ("Alpha.Two", "second"),
        ("alpha-old", "old plugged"),
        ("alpha-native", "native"),
        ("by-hand", "by hand 1"),
        ("told", "42"),
        ("python3", ""),
    ],
)
def test_scripts_run(restored: RestoredTree, script: str, said: str) -> None:
    if script == "python3":
        assert run(restored, script, "-c", "import alpha") == said
    else:
        assert run(restored, script, "x") == said


def test_data_links_and_empty_directories_are_there_and_read_only(restored: RestoredTree) -> None:
    code = f"""
import os, stat, alpha
site, tree = os.path.dirname(os.path.dirname(alpha.__file__)), {restored.tree!r}
files = [site + "/alpha/__init__.py", tree + "/share/alpha/readme.txt", tree + "/bin/alpha", site + "/loose.py"]
answer = [
    open(site + "/alpha/alias.txt").read(), os.readlink(site + "/alpha/alias.txt"), os.listdir(site + "/alpha/empty"),
    open(tree + "/share/alpha/readme.txt").read(), open(tree + "/roots/2/share/beta/b.txt").read(),
    [oct(stat.S_IMODE(os.stat(file).st_mode)) for file in files],
]
"""
    *contents, modes = ask(restored, code)
    assert contents == ["words", "data/words.txt", [], "read me", "b"]
    assert modes == ["0o444", "0o444", "0o555", "0o444"]


def test_the_choice_is_said_with_its_reason(restored: RestoredTree, cache: UnitCache) -> None:
    if restored.mode == "overlay":
        assert (restored.why, restored.tree) == ("", str(cache.view))
        assert [mount.at.removeprefix(restored.tree) for mount in restored.mounts] == [
            "",
            f"/lib/python{interpreter().minor}/site-packages",
            f"/roots/1/lib/python{interpreter().minor}/site-packages",
            "/roots/2",
            f"/roots/2/lib/python{interpreter().minor}/site-packages",
            "/code/3",
        ]
        assert os.listdir(cache.view) == []  # seen by those who mount only
    else:
        assert (restored.why, restored.mounts) == (golden("environment.restoring.test-asks-links"), ())


def test_a_known_snapshot_is_found_again_without_the_store(
    restored: RestoredTree, zoo: Snapshot, made: Made, cache: UnitCache
) -> None:
    way = RestoreMethod(mode=restored.mode, why=restored.why)
    again = restore(zoo.address, StoreBlobs(Counting()), UnitCache(cache.root), way=way)
    assert (again.units_fetched, again.fetched_bytes, restored.units_fetched) == (0, 0, 8)
    assert restored.fetched_bytes > 0
    assert msgspec.structs.replace(again, ms=0) == msgspec.structs.replace(
        restored, ms=0, units_fetched=0, fetched_bytes=0
    )


def test_a_store_without_it_says_so_and_leaves_nothing(cache: UnitCache) -> None:
    with pytest.raises(
        EnvironmentMissing, match=re.escape(golden("environment.restoring.snapshot-000000000000-store"))
    ):
        restore("0" * 64, StoreBlobs(Counting()), cache)
    assert not cache.trees.exists()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_snapshot_is_an_empty_environment(made: Made, cache: UnitCache, mode: str) -> None:
    snapshot = made.snapshot([made.root([])])
    restored = restore(
        snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
    )
    assert ask(restored, "import sys; from importlib import metadata; answer = list(metadata.distributions())") == []


def test_more_units_than_can_be_mounted_come_as_links(made: Made, cache: UnitCache) -> None:
    pieces = [made.piece({f"site/module{number}.py": f"n = {number}\n"}) for number in range(LAYERS_MAX)]
    snapshot = made.snapshot([made.root(pieces)])
    restored = restore(snapshot.address, made.blobs, cache)
    assert restored.mode == "links"
    assert restored.why == golden("environment.restoring.one-directory-made")
    assert ask(restored, "import module0, module479; answer = module479.n") == 479


@pytest.mark.skipif("overlay" not in MODES, reason="this machine cannot mount overlays")
def test_as_many_units_as_can_be_mounted_are(made: Made, cache: UnitCache) -> None:
    pieces = [made.piece({f"site/module{number}.py": f"n = {number}\n"}) for number in range(LAYERS_MAX - 2)]
    restored = restore(made.snapshot([made.root(pieces)]).address, made.blobs, cache)
    assert (restored.mode, restored.why) == ("overlay", "")
    assert ask(restored, "import module0, module477; answer = module477.n") == 477


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a compiler")
@pytest.mark.parametrize("mode", MODES)
def test_a_library_finds_one_of_another_distribution_relative_to_itself(
    made: Made, cache: UnitCache, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "low.c").write_text("int low(void) { return 7; }\n")
    (tmp_path / "high.c").write_text("int low(void); int high(void) { return low() + 1; }\n")
    gcc = ["gcc", "-shared", "-fPIC", "-o"]
    subprocess.run([*gcc, "libsglow.so", "low.c"], cwd=tmp_path, check=True)
    rpath = "-Wl,-rpath,$ORIGIN/../../low.libs"
    subprocess.run([*gcc, "libsghigh.so", "high.c", "-L.", "-lsglow", rpath], cwd=tmp_path, check=True)
    low = made.distribution("low", {"site/low.libs/libsglow.so": (tmp_path / "libsglow.so").read_bytes()})
    high = made.distribution("high", {"site/high/lib/libsghigh.so": (tmp_path / "libsghigh.so").read_bytes()})
    snapshot = made.snapshot([made.root([low, high])])
    restored = restore(
        snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
    )
    code = "import ctypes, sysconfig; lib = sysconfig.get_path('purelib') + '/high/lib/libsghigh.so'"
    assert ask(restored, f"{code}; answer = ctypes.CDLL(lib).high()") == 8


@pytest.fixture
def public(made: Made) -> Iterator[UnitCache]:
    with public_directory() as directory:
        yield UnitCache(directory / "environments")


@pytest.mark.skipif(os.geteuid() != 0 or not SYSTEM_PYTHON.exists(), reason="needs root and a system Python")
@pytest.mark.parametrize("mode", MODES)
def test_another_user_without_rights_can_use_it(made: Made, public: UnitCache, mode: str) -> None:
    umask = os.umask(0o077)  # of an administrator who shows nothing to anybody
    try:
        alpha = made.distribution("alpha", {"site/alpha/__init__.py": "a = 1\n", "site/alpha/deep/er.txt": "x"})
        snapshot = made.snapshot([made.root([alpha])], python="/usr/bin/python3")
        restored = restore(
            snapshot.address, made.blobs, public, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
        )
    finally:
        os.umask(umask)
    assert restored.base.startswith("/usr/bin/")
    code = "import os, alpha; text = open(os.path.dirname(alpha.__file__) + '/deep/er.txt').read()"
    code += "; print(os.getuid(), alpha.a, text)"
    program = command(restored, "python", "-c", code, outside="/usr/bin/python3")
    if restored.mounts:
        shutil.copytree(Path(program[4]).parent, public.root / "inside")
        program[4] = str(public.root / "inside" / "namespaces.py")
    user = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    done = subprocess.run([*user, *program], capture_output=True, text=True, check=False, cwd="/", timeout=60)
    assert done.stdout.strip() == f"{NOBODY} 1 x", done.stderr


def test_no_interpreter_for_it_is_said_before_anything_is_fetched(made: Made, cache: UnitCache) -> None:
    python = msgspec.structs.replace(interpreter(), version="3.99.1", abi="cpython-399-x86_64-linux-gnu")
    foreign = make_snapshot(python, made.simple("alpha").roots, SnapshotOrigin())
    made.blobs.write_snapshot(foreign)
    with pytest.raises(EnvironmentUnsupported, match=golden("environment.restoring.python-99-cpython")):
        restore(foreign.address, made.blobs, cache)
    assert not cache.units.exists()


def test_a_tree_that_somebody_installed_into_is_made_again_beside_them(made: Made, cache: UnitCache) -> None:
    snapshot = made.simple("alpha")
    links = RestoreMethod(mode="links")
    first = restore(snapshot.address, made.blobs, cache, way=links)
    held = cache.hold(snapshot.address)
    site = Path(first.tree) / "lib" / f"python{interpreter().minor}" / "site-packages"
    with open(site / "alpha" / "__init__.py") as in_use:
        (site / "intruder.py").write_text("x = 1\n")
        second = restore(snapshot.address, made.blobs, cache, way=links)
        assert in_use.read() == "name = 'alpha'\n"
    assert ask(second, "import importlib.util as u; answer = u.find_spec('intruder') is None")
    cache.evict()
    assert len(list(cache.trees.glob(".old-*"))) == 1  # somebody may be using it
    os.close(held)
    cache.evict()
    assert not list(cache.trees.glob(".old-*"))


def test_files_of_the_cache_cannot_be_written_through_a_tree(made: Made, cache: UnitCache) -> None:
    snapshot = made.simple("alpha")
    restored = restore(snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links"))
    file = Path(restored.tree) / "lib" / f"python{interpreter().minor}" / "site-packages" / "alpha" / "__init__.py"
    unit = cache.unit(snapshot.roots[0].members[0].address) / "site" / "alpha" / "__init__.py"
    assert os.path.samefile(file, unit)
    assert stat.S_IMODE(file.stat().st_mode) == 0o444
    if os.geteuid() != 0:
        with pytest.raises(PermissionError):
            file.open("a")


def test_F41_a_unit_larger_than_the_snapshot_says_is_refused_before_it_is_fetched(made: Made, cache: UnitCache) -> None:
    piece = made.piece({"site/big.bin": bytes(100_000)})
    lying = piece._replace(member=msgspec.structs.replace(piece.member, size=10))
    snapshot = made.snapshot([made.root([lying])])
    with pytest.raises(EnvironmentRejected, match=re.escape(golden("environment.restoring.100000-bytes-files"))):
        restore(snapshot.address, made.blobs, cache)
    assert not cache.units.exists()


def test_an_older_c_library_is_noted(made: Made, cache: UnitCache) -> None:
    python = msgspec.structs.replace(interpreter(), glibc="99.1")
    snapshot = make_snapshot(python, made.simple("alpha").roots, SnapshotOrigin())
    made.blobs.write_snapshot(snapshot)
    restored = restore(snapshot.address, made.blobs, cache)
    assert restored.note == golden("environment.restoring.captured-glibc-99", glibc=glibc())


@pytest.mark.parametrize("mode", MODES)
def test_what_a_killed_restore_left_is_made_again(made: Made, cache: UnitCache, mode: str) -> None:
    snapshot = made.simple("alpha")
    for name in (".new-tree", ".new-overlay"):
        half = cache.environment(snapshot.address) / name
        half.mkdir(parents=True)
        (half / "pyvenv.cfg").write_text("half")
    restored = restore(
        snapshot.address, made.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
    )
    assert ask(restored, "import alpha; answer = alpha.name") == "alpha"


@pytest.mark.parametrize("mode", MODES)
def test_processes_that_restore_at_the_same_time_all_get_it(cache: UnitCache, tmp_path: Path, mode: str) -> None:
    shared = Made(StoreBlobs(DirectoryStore(tmp_path / "store")))
    names = [f"many{number}" for number in range(12)]
    pieces = [shared.distribution(name, {f"site/{name}.py": f"n = {name!r}\n"}) for name in names]
    loaded = tuple(f"site/{name}.py" for name in names)
    snapshot = shared.snapshot([shared.root(pieces)], facts=SnapshotOrigin(loaded=(loaded,)))
    code = f"""
import sys
from pathlib import Path
from serverless_gpu.environment.stores.blobs import StoreBlobs
from serverless_gpu.environment.restore.cache.unit_cache import UnitCache
from serverless_gpu.environment.restore.restore import RestoreMethod, restore
from serverless_gpu.environment.stores.directory_store import DirectoryStore
blobs = StoreBlobs(DirectoryStore(Path({str(tmp_path / "store")!r})))
cache = UnitCache(Path({str(cache.root)!r}))
print(restore({snapshot.address!r}, blobs, cache, way=RestoreMethod(mode={mode!r})).units_fetched)
"""
    command = [sys.executable, "-c", code]
    crowd = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=60) for process in crowd]
    assert [process.returncode for process in crowd] == [0] * 4, said
    assert sum(int(out) for out, _ in said) == 12
    restored = restore(
        snapshot.address, shared.blobs, cache, way=RestoreMethod(mode="links" if mode == "links" else "overlay")
    )
    assert ask(restored, "import many0, many11; answer = many11.n") == "many11"
    assert sorted(path.name for path in cache.trees.iterdir()) == [snapshot.address]
