"""Unpickling executes whatever the bytes say, so it happens in one room only: `node/inside/payload.py`.

Server, agent, supervisor and web pages handle payloads of many users; one convenient `pickle.load` there hands the
machine to whoever wrote the file. Everything that can unpickle counts, `torch.load` and `shelve` included.
"""

from __future__ import annotations

from collections.abc import Iterator

from scripts.lints.source import INSIDE, Finding, Source

# Tests may unpickle what they have pickled themselves.
AREAS = ("src", "scripts", "examples")  # benchmarks compare with pickle
ROOM = f"{INSIDE}payload.py"
UNPICKLERS = frozenset(
    f"{module}.{name}"
    for module in ("pickle", "_pickle", "cloudpickle", "cloudpickle.cloudpickle", "dill")
    for name in ("load", "loads", "Unpickler", "_Unpickler", "_load", "_loads")
) | {
    "joblib.load",
    "marshal.load",
    "marshal.loads",
    "pandas.read_pickle",
    "shelve.open",
    "shelve.Shelf",
    "shelve.DbfilenameShelf",
    "torch.load",
    "torch.serialization.load",
}


def check(source: Source) -> Iterator[Finding]:
    """Yield every use of something that unpickles, outside the one room."""
    if source.path == ROOM:
        return
    for line, name in source.references():
        if name in UNPICKLERS:
            message = f"{name} executes what it reads; use load() or loads() of serverless_gpu.node.inside.payload"
            yield source.finding(line, "unpickling", message)
