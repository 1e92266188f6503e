"""Messages of zygote, stem and rank, and the version of their protocol.

    agent ──▶ zygote   {"op": "stem", "cgroups": [path, …], "ranks": n, "mounts": plan, "apart": bool}
                                                   fork one stem, n ranks standing by; with a plan
                                                   (`namespaces.py`) and a descriptor, in another environment;
                                                   "apart": in a user namespace of its own
                       {"op": "hold"} + descriptors                    kept open until the zygote and its stems end
    zygote ─▶ agent    {"event": "ready", "modules": [path, …], "packages": {name: path},
                        "names": [name, …], "libraries": [path, …]}
                       {"event": "cold", "reason": text}              it cannot be forked from; ends
                       {"event": "stem", "pid": n} + descriptor of the stem's channel
    supervisor ─▶ stem {"op": "rank", "rank": n, "local_rank": n, "env": {…}} + stdout and stderr descriptors
                                                                       "rank" is its number in the gang, here and below
                       {"op": "hold"} + lock descriptors              kept open until the stem ends
                       {"op": "go", "directory": …, "cwd": …, …}      start all ranks; with "command": [argument, …]
                                                                       each runs that instead of the call;
                                                                       "tracked": MLflow knows the job's run;
                                                                       "ray": the rank's share of a cluster
                                                                       (`raycluster/share.py`), which it makes
                       {"op": "release"}                              all have returned: ranks may exit
                       {"op": "signal", "signal": n, "ranks": [n, …]} · {"op": "kill"}
    stem ─▶ supervisor {"event": "standby", "version": n, "pid": n, "cgroups": [path, …]}
                       {"event": "forked", "pids": {"0": n}} · {"event": "problem", "detail": text}
                       {"event": "exited", "rank": n, "status": n, "peak": bytes, "at": ns} · {"event": "empty"}
    rank ─▶ supervisor {"event": "exec", "rank": n, "at": ns, "stack": descriptor in the rank}
                       {"event": "enter", "rank": n, "at": ns}
                       {"event": "returned", "rank": n, "at": ns, "size": bytes, "alone": bool}
                       {"event": "failed", "rank": n, "at": ns, "failure": {…}}
                       {"event": "say", "rank": n, "at": ns, "text": …, "note": bool}
                                                                       for watchers, and the receipt

`at` is CLOCK_BOOTTIME in nanoseconds; all processes of a node share that clock. Both sides send the version first
thing, and a side that does not know the other's version refuses: agent and runtime may come from different installs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

VERSION = 8

# A rank answers both by writing its Python stack to its memfd of that name: the first, SIGRTMAX-7, in C, wherever it
# is; the second once its main thread runs Python, with PASSED at the end. Not SIGUSR1 or SIGUSR2, which user code and
# Lightning take; C libraries and runtimes use the real-time signals at both ends.
STACK_SIGNAL = 57
PASS_SIGNAL = 58
LOOK_SIGNALS = frozenset({STACK_SIGNAL, PASS_SIGNAL})
PASSED = b"passed\n"
STACK_FILE = "sgpu-stacks"

UNSTORED = ("pkl", "json")
"""Endings of the files that a failed rank could not write, in the order in which to write them."""
UNSTORED_BYTES_MAX = 48 << 10

UNSHARED = "runs get no user namespace of their own here, so none shares an interpreter with another"
"""Why runs of a server's principals start cold on a node; what the kernel said follows in parentheses."""

_INTEGER_MAX = 2**63 - 1
_SHOWN_MAX = 100

Message = dict[str, object]
Report = Callable[[Message], None]
"""Says something to the supervisor."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """Return nanoseconds since boot."""
    return time.clock_gettime_ns(_CLOCK)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """Return the message in bytes; raises ValueError unless they are a JSON object."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def integer(message: Message, key: str) -> int:
    """Return an integer field, or raise ValueError."""
    value = message.get(key)
    if not isinstance(value, int) or not -_INTEGER_MAX <= value <= _INTEGER_MAX:
        raise ValueError(f"field {key!r} must be an integer, not {str(value)[:_SHOWN_MAX]}")
    return value


def text(message: Message, key: str) -> str:
    """Return a string field, or raise ValueError."""
    value = message.get(key)
    if not isinstance(value, str):
        raise ValueError(f"field {key!r} must be a string, not {value!r}")
    return value


def strings(message: Message, key: str) -> list[str]:
    """Return a field that is a list of strings, or raise ValueError."""
    values = message.get(key)
    if not isinstance(values, list):
        raise ValueError(f"field {key!r} must be a list, not {values!r}")
    return [str(value) for value in values]
