"""A scan laid out under another path, as simply as can be: to see that what it holds is all that is needed.

Restoring is much more than this (links, bytecode, scripts, safety); here files are copied and texts filled in.
"""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.environment.documents import Snapshot
from serverless_gpu.environment.scan.scan import Scan
from tests.support.environment.wheels import BASE, run


class LaidOut:
    """An environment made of a scan.

    Args:
        scan: what it holds.
        tree: where it is made.
    """

    def __init__(self, scan: Scan, tree: Path) -> None:
        snapshot = scan.snapshot
        minor = f"python{snapshot.interpreter.minor}"
        (tree / "bin").mkdir(parents=True)
        (tree / "pyvenv.cfg").write_text(f"home = {BASE.parent}\n")
        self.python = tree / "bin" / "python"
        self.python.symlink_to(BASE)
        self.sites = [
            (tree if number == 0 else tree / "roots" / str(number)) / "lib" / minor / "site-packages"
            for number in range(len(snapshot.roots))
        ]
        for number, root in enumerate(snapshot.roots):
            for member in root.members:
                self._write_unit(scan, member.address, number)
            self._write_texts(snapshot, number)
        listed = [number for number, root in enumerate(snapshot.roots) if number and root.on_path]
        (self.sites[0] / "_sgpu_roots.pth").write_text("".join(f"{self.sites[number]}\n" for number in listed))

    def run(self, program: str) -> str:
        """Run a program in it, without our own directory on the path, and return what it printed."""
        return run([self.python, "-P", "-c", program], cwd=Path("/"))

    def place(self, number: int, path: str) -> Path:
        """Return where a row of a root lies."""
        area, _, rest = path.partition("/")
        return self.sites[number] / rest if area == "site" else self.sites[number].parents[2] / rest

    def _write_unit(self, scan: Scan, address: str, number: int) -> None:
        source = scan.sources[address]
        files = iter(source.files)
        for index, row in enumerate(source.rows):
            at = self.place(number, row.path)
            at.parent.mkdir(parents=True, exist_ok=True)
            if row.kind == "l":
                at.symlink_to(row.target)
                continue
            file = next(files)
            at.write_bytes(source.texts[index] if index in source.texts else Path(file).read_bytes())
            assert at.stat().st_size == row.size
            os.chmod(at, 0o755 if row.kind == "x" else 0o644)

    def _write_texts(self, snapshot: Snapshot, number: int) -> None:
        texts = {file.path: file.text for file in snapshot.roots[number].generated} | snapshot.facts.notes[number]
        for path, text in texts.items():
            for other, site in enumerate(self.sites):
                text = text.replace(f"{{{{sgpu:{other}}}}}", str(site))
            at = self.place(number, path)
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_text(text)
