"""A scan that knows the last one says exactly what a scan says that knows nothing, whatever has changed in between."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.environment.documents import ignore_progress
from serverless_gpu.environment.scan.description import Description
from serverless_gpu.environment.scan.scan import Recogniser, Scan
from serverless_gpu.errors import EnvironmentUnsupported
from tests.support.environment.scans import check, wait_for_ticks
from tests.support.environment.venvs import INSTALLED_S, install, make_venv, site_packages
from tests.support.environment.wheels import describe_in

RIGHT = "zeta/same.py,sha256=Q1WkaxnTSNwvV8BG-O9j1FOOu5NgAPPJ7pVKJ0YN2GU,2"  # of "1\n"
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")
SEEDS = range(12)
STEPS = 14


class Changing:
    """A virtual environment and a project that change, and what remembers them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.prefix = directory / "venv"
        self.python = make_venv(self.prefix)
        self.site = site_packages(self.prefix)
        self.project = directory / "project"
        (self.project / "package").mkdir(parents=True)
        (self.project / "train.py").write_text("import package\n")
        self.count = 0
        for name in NAMES:
            self.install(name)
        self.described = describe_in(self.python, self.project)
        self.reused = 0
        self.compare(remember=True)

    def describe(self) -> Description:
        files = self.modules()
        loaded = self.random.sample(files, min(6, len(files)))
        return msgspec.structs.replace(self.described, loaded=tuple(str(file) for file in loaded))

    def modules(self) -> list[Path]:
        return sorted(path for path in self.site.rglob("*.py") if path.is_file() and not path.is_symlink())

    def packages(self) -> list[Path]:
        return sorted(path for path in self.site.iterdir() if path.is_dir() and path.suffix != ".dist-info")

    def infos(self) -> list[Path]:
        return sorted(self.site.glob("*.dist-info"))

    def write(self, path: Path, text: str) -> None:
        for above in (path, *path.parents):
            if above.is_file() and above != path:
                above.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        path.write_text(text)

    def number(self) -> int:
        self.count += 1
        return self.count

    def install(self, name: str) -> None:
        """Install another version by hand; now and then with shared, odd and rewritten files."""
        version = f"{self.number()}.0"
        info = f"{name}-{version}.dist-info"
        files = {f"{name}/__init__.py": f"v = {version}\n", f"{name}/same.py": "1\n", f"{name}/deep/er/file.py": "2\n"}
        files.update({f"{name}/f{self.random.randrange(4)}.py": f"{self.random.randrange(2)}\n"})
        if self.random.random() < 0.15:
            files["shared/__init__.py"] = "1" * self.random.randrange(1, 3)  # a RECORD that lies would be believed
        if self.random.random() < 0.2:
            files[f"../../../bin/{name}-tool"] = "#!/usr/bin/python3\nprint()\n"
        if self.random.random() < 0.2:
            files[f"../../../share/{name}/data"] = f"{version}\n"
        if self.random.random() < 0.2:
            files[f"{name}.pth"] = f"{self.project}\n"
        if self.random.random() < 0.2:
            files[f"{info}/entry_points.txt"] = f"[console_scripts]\n{name}-run = {name}:x\n"
            files[f"../../../bin/{name}-run"] = "#!/usr/bin/python3\n"
        for older in self.infos():
            if older.name.startswith(f"{name}-"):
                self.uninstall(older)
        for old in (self.site / name, self.site / "shared"):
            if old.is_file() or old.is_symlink():
                old.unlink()
        install(self.prefix, name, version, {path: text.encode() for path, text in files.items()})
        for path in (*files, *(f"{info}/{file}" for file in ("METADATA", "WHEEL", "INSTALLER", "RECORD"))):
            # A time of its own: an inode, size and time that were there before would be no change to anybody.
            os.utime(self.site / path, ns=(0, INSTALLED_S * 10**9 + self.count))

    def uninstall(self, info: Path) -> None:
        record = info / "RECORD"
        for line in record.read_text().splitlines() if record.exists() else ():
            path = self.site / line.partition(",")[0]
            if path.is_file() or path.is_symlink():
                path.unlink()
        shutil.rmtree(info, ignore_errors=True)

    def change(self) -> str:
        name = self.random.choice(sorted(CHANGES))
        CHANGES[name](self)
        return name

    def compare(self, *, remember: bool) -> None:
        """Scan with and without knowing anything, and compare all of it."""
        wait_for_ticks()
        description = self.describe()
        known, unknown = self.directory / "index", self.directory / f"index{self.number()}"
        knowing, fresh = Recogniser(known), Recogniser(unknown)
        first, second = _scanned(knowing, description), _scanned(fresh, description)
        if isinstance(first, str) or isinstance(second, str):
            assert first == second
            return
        assert knowing._seen is not None
        reused = knowing._seen.survey.parts[0].reused
        self.reused += len(reused.members) if reused is not None else 0
        assert _told(first) == _told(second)
        assert _plain(first) == _plain(second)
        assert first.snapshot.address == second.snapshot.address
        check(first)
        if remember:
            knowing.remember(first)
            fresh.remember(second)
            one, other = (Recogniser(path).gate(description) for path in (known, unknown))
            assert (one and one.address) == (other and other.address)


def _scanned(recogniser: Recogniser, description: Description) -> Scan | str:
    try:
        return recogniser.scan(description, ignore_progress)
    except EnvironmentUnsupported as error:
        return str(error)


def _told(scan: Scan) -> set[str]:
    """Return everything in words, so that a failure shows the difference and nothing else."""
    snapshot = scan.snapshot
    told = {f"facts {snapshot.facts.notes} {snapshot.facts.loaded} {snapshot.facts.left_out}"}
    for number, root in enumerate(snapshot.roots):
        told.add(f"root {number}: {root.generated}")
        for member in root.members:
            rows = ((row.path, row.kind, row.size, row.sha256[:3]) for row in scan.sources[member.address].rows)
            told |= {f"{number} {member.kind} {member.name} {member.version}: {row}" for row in rows}
    return told


def _plain(scan: Scan) -> object:
    facts = msgspec.structs.replace(scan.snapshot.facts, captured_ns=0)
    sources = {address: (one.rows, one.files, one.texts) for address, one in scan.sources.items()}
    return msgspec.structs.replace(scan.snapshot, facts=facts), sources


def _any(changing: Changing) -> Path:
    return changing.random.choice(changing.modules() or [changing.site / "new.py"])


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write("# more\n")


def _replace(path: Path, text: str) -> None:
    other = path.with_name("replacement")
    other.write_text(text)
    other.replace(path)


def _copy_with_times(changing: Changing) -> None:
    package = changing.random.choice(changing.packages())
    copy = changing.directory / f"copy{changing.number()}"
    shutil.copytree(package, copy, symlinks=True)
    with open(changing.random.choice([*filter(Path.is_file, copy.rglob("*.py")), copy / "new.py"]), "a") as file:
        file.write("# more\n")
    for path in (*copy.rglob("*"), copy):
        original = package / path.relative_to(copy)
        if original.exists() and not path.is_symlink():
            os.utime(path, ns=(0, original.stat().st_mtime_ns))
    shutil.rmtree(package)
    copy.rename(package)


def _edit_record(changing: Changing) -> None:
    info = changing.random.choice(changing.infos())
    lines = (info / "RECORD").read_text().splitlines() if (info / "RECORD").exists() else [""]
    what = changing.random.randrange(4)
    if what == 0:
        lines.pop(0)
    elif what == 1:
        lines.append(f"later/module{changing.random.randrange(2)}.py,,")
    elif what == 2:
        lines.append(f"{changing.random.choice(NAMES)}/same.py,,")
    else:
        lines.append("loose.py,,")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    # As old as its files, so that it is not believed of those that were edited since.
    os.utime(info / "RECORD", ns=(0, INSTALLED_S * 10**9 + changing.number()))


def _link(changing: Changing) -> None:
    path = _any(changing)
    outside = changing.directory / "outside.py"
    outside.write_text(f"{changing.random.randrange(2)}\n")
    target = changing.random.choice([str(outside), "__init__.py", "deep/er/file.py", "../beta/same.py"])
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _rename_away_and_back(changing: Changing) -> None:
    package = changing.random.choice(changing.packages())
    package.rename(changing.site / "away")
    (changing.site / "away").rename(package)


CHANGES: dict[str, Callable[[Changing], object]] = {
    "nothing": lambda changing: None,
    "a distribution installed": lambda changing: changing.install(changing.random.choice(NAMES)),
    "another one installed": lambda changing: changing.install(f"new{changing.random.randrange(3)}"),
    "a distribution removed": lambda changing: changing.uninstall(changing.random.choice(changing.infos())),
    "RECORD removed": lambda changing: (changing.random.choice(changing.infos()) / "RECORD").unlink(missing_ok=True),
    "RECORD edited": lambda changing: _edit_record(changing),
    "another installer": lambda changing: (changing.random.choice(changing.infos()) / "INSTALLER").write_text("me\n"),
    "a note": lambda changing: (changing.random.choice(changing.infos()) / "REQUESTED").write_text(""),
    "edited in place": lambda changing: changing.write(_any(changing), f"{changing.number()} # edited\n"),
    "edited, size kept": lambda changing: _any(changing).write_text("7\n"),
    "replaced": lambda changing: _replace(_any(changing), f"{changing.number()}\n"),
    "touched": lambda changing: os.utime(_any(changing), (INSTALLED_S + 9, INSTALLED_S + 9)),
    "made executable": lambda changing: _any(changing).chmod(0o755),
    "removed": lambda changing: _any(changing).unlink(),
    "a module added": lambda changing: changing.write(changing.site / "alpha" / f"n{changing.number()}.py", "3\n"),
    "a claimed module added": lambda changing: changing.write(
        changing.site / "later" / f"module{changing.random.randrange(2)}.py", "4\n"
    ),
    "a loose file": lambda changing: changing.write(changing.site / "loose.py", f"{changing.number()}\n"),
    "a loose directory": lambda changing: changing.write(changing.site / "loose" / "a" / "b" / "c.py", "5\n"),
    "a package removed": lambda changing: shutil.rmtree(changing.random.choice(changing.packages())),
    "a package copied with its times": lambda changing: _copy_with_times(changing),
    "a package renamed, and back": lambda changing: _rename_away_and_back(changing),
    "a package becomes a file": lambda changing: changing.write(changing.site / "gamma", "6\n"),
    "a file becomes a package": lambda changing: changing.write(changing.site / "loose.py" / "__init__.py", "7\n"),
    "a link": lambda changing: _link(changing),
    "bytecode": lambda changing: changing.write(changing.site / "alpha" / "__pycache__" / "same.pyc", "8\n"),
    "a .pth": lambda changing: changing.write(changing.site / "x.pth", f"{changing.project}\n# {changing.number()}\n"),
    "a script": lambda changing: changing.write(
        changing.prefix / "bin" / f"s{changing.random.randrange(2)}", f"#!/usr/bin/python3\n{changing.number()}\n"
    ),
    "data": lambda changing: changing.write(changing.prefix / "share" / "d" / f"f{changing.number()}", "9\n"),
    "pyvenv.cfg": lambda changing: _append(changing.prefix / "pyvenv.cfg"),
    "code": lambda changing: changing.write(changing.project / "train.py", f"{changing.number()}\n"),
    "code added": lambda changing: changing.write(changing.project / "package" / f"m{changing.number()}.py", "1\n"),
    "a project's package in the library": lambda changing: changing.write(
        changing.site / "spot" / "__init__.py", f"{changing.number()}\n"
    ),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_a_knowing_scan_equals_one_that_knows_nothing(tmp_path: Path, seed: int) -> None:
    changing = Changing(tmp_path, seed)
    happened: list[str] = []
    for _ in range(STEPS):
        happened += [changing.change() for _ in range(changing.random.randrange(1, 4))]
        try:
            changing.compare(remember=changing.random.random() < 0.7)
        except AssertionError:
            print(happened)
            raise
    assert changing.reused > 0  # else this test would prove nothing


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_knowing_scan_equals_one_that_knows_nothing_after(tmp_path: Path, name: str) -> None:
    changing = Changing(tmp_path, 99)
    changing.compare(remember=True)
    CHANGES[name](changing)
    changing.compare(remember=True)
    changing.compare(remember=False)
    assert changing.reused > 0


def _plain_ones(directory: Path) -> Changing:
    """Return an environment whose distributions can all be reused."""
    changing = Changing(directory, 1)
    changing.random.random = lambda: 1.0  # type: ignore[method-assign]  # nothing shared, odd, or rewritten
    for name in NAMES:
        changing.install(name)
    for path in (changing.site / "shared", *changing.site.glob("*.pth")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    changing.compare(remember=True)
    changing.reused = 0
    changing.compare(remember=True)
    assert changing.reused == len(NAMES)
    return changing


def test_a_link_to_nowhere_is_said_again_and_again(tmp_path: Path) -> None:
    changing = _plain_ones(tmp_path)
    (changing.site / "beta" / "same.py").unlink()
    (changing.site / "beta" / "same.py").symlink_to("nowhere.py")
    for _ in range(3):
        changing.compare(remember=True)


def test_a_file_that_was_claimed_and_missing_is_its_owners_when_it_comes(tmp_path: Path) -> None:
    changing = _plain_ones(tmp_path)
    record = next(changing.site.glob("beta-*")) / "RECORD"
    record.write_text(record.read_text() + "later/module.py,,\n")
    os.utime(record, ns=(0, INSTALLED_S * 10**9 + changing.number()))
    changing.compare(remember=True)
    changing.compare(remember=True)
    changing.write(changing.site / "later" / "module.py", "1\n")
    changing.compare(remember=True)


def test_a_file_that_another_claims_now_belongs_to_whoever_is_right(tmp_path: Path) -> None:
    changing = _plain_ones(tmp_path)
    record = next(changing.site.glob("beta-*")) / "RECORD"
    for line in ("delta/same.py,,", RIGHT):
        record.write_text(f"{record.read_text()}{line}\n")
        os.utime(record, ns=(0, INSTALLED_S * 10**9 + changing.number()))
        changing.compare(remember=True)
        changing.compare(remember=True)
