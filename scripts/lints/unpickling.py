"""Unpickling executes whatever the bytes say, so it happens in one room only: `node/inside/payload.py`.

Server, agent, supervisor and web pages handle payloads of many users; one convenient `pickle.load` there hands the
machine to whoever wrote the file. Everything that can unpickle counts, `torch.load` and `shelve` included. Rooms that
handle other people's bytes all day may not even import what unpickles (or reaches our own room for it): a name that
is looked up while the program runs, or a pipe of `multiprocessing`, would pass a rule about uses. What an example
trains is the user's own, and its ranks load what they saved: `torch.load` with `weights_only=True`, which does not
execute anything.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.lints.source import INSIDE, Finding, Source

# Tests may unpickle what they have pickled themselves.
AREAS = ("src", "scripts", "examples")  # benchmarks compare with pickle
ROOM = f"{INSIDE}payload.py"
_PAYLOAD = "serverless_gpu.node.inside.payload"
SEALED = tuple(
    f"src/serverless_gpu/{room}/" for room in ("cli", "doctor", "engines", "environment", "node", "server", "wire")
)
NOT_IN_SEALED = ("_pickle", "cloudpickle", "dill", "joblib", "multiprocessing", "pickle", "shelve")
UNPICKLERS = frozenset(
    f"{module}.{name}"
    for module in ("pickle", "_pickle", "cloudpickle", "cloudpickle.cloudpickle", "dill")
    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads")
) | {
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "numpy.lib.format.read_array",
    "pandas.read_pickle",
    "shelve.open",
    "shelve.Shelf",
    "shelve.DbfilenameShelf",
    "sqlalchemy.PickleType",
    "sqlalchemy.types.PickleType",
    "torch.load",
    "torch.serialization.load",
}


def check(source: Source) -> Iterator[Finding]:
    """Yield every use of something that unpickles, outside the one room."""
    if source.path == ROOM:
        return
    weights = _weights_only(source) if source.path.startswith("examples/") else frozenset()
    for line, name in source.references():
        if name in UNPICKLERS and line not in weights:
            message = f"{name} executes what it reads; use load() or loads() of serverless_gpu.node.inside.payload"
            yield source.finding(line, "unpickling", message)
    if source.path.startswith(SEALED) and not source.path.startswith(INSIDE):
        yield from _imports(source)


def _imports(source: Source) -> Iterator[Finding]:
    """Yield every import, in a room that handles other people's bytes, of something that unpickles."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in NOT_IN_SEALED or name.startswith(_PAYLOAD):
                message = f"{name} can unpickle, and nothing in this room needs it; bytes of users stay bytes here"
                yield source.finding(node.lineno, "unpickling", message)


def _weights_only(source: Source) -> frozenset[int]:
    """Return the lines of calls that load tensors and plain values only."""
    return frozenset(
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
    )
