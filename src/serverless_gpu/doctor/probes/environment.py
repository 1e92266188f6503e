"""Probes installed packages and package imports in separate processes.

The probe programs `packages.py` and `import_program.py` use only the standard library. Both programs receive the
caller's environment variables. The programs' `sys.path` omits the working directory. The programs therefore report a
user's file that hides a module, but never execute the file. The programs print one Python literal per line, because
parsing literals requires few imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.doctor.facts import Imported, ImportFacts, InterpreterFacts, TorchFacts, UnknownFact
from serverless_gpu.doctor.probes.bounded_calls import ChildEnded, look, side_by_side
from serverless_gpu.json_codec import from_builtins

# One probe process imports the torch packages, and another process imports the packages based on NumPy.
_FAMILIES = (("torch", "torchvision", "torchaudio"), ("numpy", "scipy", "sklearn", "pandas", "pyarrow", "numba", "cv2"))
_WORTHWHILE_S = 0.5
_PROGRAMS = Path(__file__).parent


def look_at_packages(limit_s: float) -> InterpreterFacts | UnknownFact:
    """Return the facts about the interpreter and its installed packages."""
    ended = _run("packages.py", (), limit_s)
    for record in _records(ended):
        if record and record[0] == "packages":
            return from_builtins(record[1], InterpreterFacts)
    return UnknownFact(f"{ended.why}. {ended.written.strip()[-300:]}".strip())


def look_at_imports(limit_s: float) -> ImportFacts:
    """Import common machine learning packages and return the import outcomes."""
    looks = {family[0]: lambda family=family: _import_all(family, limit_s) for family in _FAMILIES}
    facts = ImportFacts()
    for found in side_by_side(looks, limit_s + 0.3).values():
        if isinstance(found, ImportFacts):
            facts = ImportFacts(
                modules=facts.modules | found.modules,
                torch=facts.torch or found.torch,
                openmp=tuple(sorted({*facts.openmp, *found.openmp})),
            )
    return facts


def _import_all(names: Sequence[str], limit_s: float) -> ImportFacts:
    """Import modules one by one. After a crash, import the remaining modules in a new process."""
    clock = SystemClock()
    deadline_ns = clock.boottime_ns() + int(limit_s * 1e9)
    modules: dict[str, Imported] = {}
    facts = ImportFacts()
    left = list(names)
    while left:
        left_s = (deadline_ns - clock.boottime_ns()) / 1e9
        if left_s < _WORTHWHILE_S:
            break
        # Like the zygote, the probe process imports packages with `/` as its working directory.
        ended = _run("import_program.py", left, left_s, "/")
        seen = read_imports(list(_records(ended)), ended)
        modules |= seen.modules
        facts = ImportFacts(torch=facts.torch or seen.torch, openmp=(*facts.openmp, *seen.openmp))
        if not seen.modules:
            modules |= {name: Imported(outcome="untried", error=ended.why, written=ended.written) for name in left}
        left = [name for name in left if name not in modules]
    modules |= {
        name: Imported(outcome="untried", error=f"the probe reached its time limit of {limit_s:g} s before the import")
        for name in left
    }
    return msgspec.structs.replace(facts, modules={name: modules[name] for name in names})


def read_imports(records: Sequence[tuple[object, ...]], ended: ChildEnded) -> ImportFacts:
    """Return the import outcomes that a probe process reported.

    For an unfinished import, derive the outcome from the exit of the probe process.
    """
    modules: dict[str, Imported] = {}
    begun = ""
    torch: TorchFacts | None = None
    openmp: tuple[str, ...] = ()
    for record in records:
        match record:
            case ("begin", str() as begun):
                pass
            case ("end", str() as name, str() as outcome, str() as error, str() as written):
                modules[name], begun = Imported(outcome=outcome, error=error, written=written), ""
            case ("torch", dict() as said):
                torch = from_builtins(said, TorchFacts)
            case ("openmp", list() as paths):
                openmp = tuple(str(path) for path in paths)
    if begun == "torch.cuda" and torch is not None:
        torch = msgspec.structs.replace(torch, problem=ended.why)
    elif begun:
        outcome = "hung" if ended.code is None else "crashed"
        modules[begun] = Imported(outcome=outcome, error=ended.why, written=ended.written)
    return ImportFacts(modules=modules, torch=torch, openmp=openmp)


def _run(program: str, arguments: Sequence[str], limit_s: float, cwd: str | None = None) -> ChildEnded:
    source = (_PROGRAMS / program).read_text(encoding="utf-8")

    def start(fd: int, log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", source, str(fd), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            pass_fds=(fd,),
            start_new_session=True,
        )

    return look(start, limit_s)


def _records(ended: ChildEnded) -> Iterator[tuple[object, ...]]:
    for line in ended.answer.decode("ascii", "replace").splitlines():
        try:
            record = ast.literal_eval(line)
        except (ValueError, SyntaxError):  # The probe process ended in the middle of a line.
            continue
        if isinstance(record, tuple):
            yield record
