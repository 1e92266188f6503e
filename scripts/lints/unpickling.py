"""Allows only `node/inside/payload.py` to unpickle, because unpickling executes code from the bytes.

Server, agent, supervisor and web pages handle payloads of many users. One `pickle.load` there would give the machine to
the author of the payload. The rule covers everything that can unpickle, including `torch.load` and `shelve`. Packages
that handle other users' bytes may not even import such a module, or `payload.py`. A rule about uses alone would miss
names that the program looks up at run time, and pipes of `multiprocessing`. Examples may call `torch.load` with
`weights_only=True`, which executes nothing, on the weights that their own ranks have saved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from scripts.lints.source import INSIDE, Finding, Source

# Tests may unpickle their own pickles.
AREAS = ("src", "scripts", "examples")  # Benchmarks compare with pickle.
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
    """Yield each use of a function that unpickles, outside of `payload.py`."""
    if source.path == ROOM:
        return
    weights = _weights_only(source) if source.path.startswith("examples/") else frozenset()
    for line, name in source.references():
        if name in UNPICKLERS and line not in weights:
            message = (
                f"{name} executes code from its input; use load() or loads() of serverless_gpu.node.inside.payload"
            )
            yield source.finding(line, "unpickling", message)
    if source.path.startswith(SEALED) and not source.path.startswith(INSIDE):
        yield from _imports(source)


def _imports(source: Source) -> Iterator[Finding]:
    """Yield each import of a module that can unpickle, in a package that handles other users' bytes."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] in NOT_IN_SEALED or name.startswith(_PAYLOAD):
                message = f"{name} can unpickle; this package must not unpickle the bytes of users"
                yield source.finding(node.lineno, "unpickling", message)


def _weights_only(source: Source) -> frozenset[int]:
    """Return the lines of calls that load only tensors and plain values."""
    return frozenset(
        node.lineno
        for node in source.nodes
        if isinstance(node, ast.Call)
        and any(
            keyword.arg == "weights_only" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            for keyword in node.keywords
        )
    )
