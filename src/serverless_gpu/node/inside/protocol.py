"""Messages between zygote, stem and rank, and the version of their protocol.

    agent ──▶ zygote   {"op": "stem", "cgroups": [path, …], "ranks": n, "mounts": plan, "apart": bool,
                        "isolation": {"level": …, "trees": [path, …], "memory": bytes}}
                                                   fork one stem with n standby ranks; a plan
                                                   (`namespaces.py`) and a descriptor select another
                                                   environment; "apart" adds a user namespace;
                                                   "isolation": the stem belongs to a principal with a uid of its own
                       {"op": "hold"} + descriptors                    the zygote and its stems keep them open
    zygote ─▶ agent    {"event": "ready", "modules": [path, …], "packages": {name: path},
                        "names": [name, …], "libraries": [path, …]}
                       {"event": "cold", "reason": text}              the zygote cannot fork safely and ends
                       {"event": "stem", "pid": n} + descriptor of the stem's channel
    supervisor ─▶ stem {"op": "rank", "rank": n, "local_rank": n, "env": {…}} + stdout and stderr descriptors
                                                                       "rank" is the number in the gang, here and below
                       {"op": "hold"} + lock descriptors              the stem keeps them open until it ends
                       {"op": "go", "directory": …, "cwd": …, …}      start all ranks; with "command": [argument, …]
                                                                       each rank runs that program, not the call;
                                                                       "tty": on a pseudo-terminal (`terminal.py`);
                                                                       "tracked": MLflow knows the job's run;
                                                                       "ray": the rank's share of a Ray cluster
                                                                       (`raycluster/share.py`), which it starts
                       {"op": "open", "target": {…}, "env": {…}, "work": …, "cwd": …} + a socket
                                                                       fork an endpoint (`endpoint.py`)
                       {"op": "release"}                              all ranks have returned and may exit
                       {"op": "signal", "signal": n, "ranks": [n, …]} · {"op": "kill"}
    stem ─▶ supervisor {"event": "standby", "version": n, "pid": n, "cgroups": [path, …]}
                       {"event": "forked", "pids": {"0": n}} · {"event": "problem", "detail": text}
                       {"event": "exited", "rank": n, "status": n, "peak": bytes, "at": ns} · {"event": "empty"}
    rank ─▶ supervisor {"event": "exec", "rank": n, "at": ns, "stack": descriptor in the rank}
                       {"event": "enter", "rank": n, "at": ns}
                       {"event": "returned", "rank": n, "at": ns, "size": bytes, "alone": bool}
                       {"event": "failed", "rank": n, "at": ns, "failure": {…}}
                       {"event": "say", "rank": n, "at": ns, "text": …, "note": bool}
                                                                       for attached clients and the receipt

`at` is a CLOCK_BOOTTIME timestamp in nanoseconds. All processes of a node share CLOCK_BOOTTIME. Each peer sends its
protocol version first. Each peer rejects an unknown protocol version, because agent and runtime may come from different
installations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

VERSION = 9

SANDBOX = "sandbox"
"""Isolation level `sandbox`, as in `model/isolation.py`."""

# A rank answers STACK_SIGNAL and PASS_SIGNAL by writing its Python stack to the memfd STACK_FILE. A C handler answers
# STACK_SIGNAL (SIGRTMAX-7) at any time. A Python handler answers PASS_SIGNAL when the main thread next runs Python
# code, and ends its answer with PASSED. SIGUSR1 and SIGUSR2 are not available, because user code and Lightning use
# them. C libraries and language runtimes use both ends of the real-time signal range.
STACK_SIGNAL = 57
PASS_SIGNAL = 58
LOOK_SIGNALS = frozenset({STACK_SIGNAL, PASS_SIGNAL})
PASSED = b"passed\n"
STACK_FILE = "sgpu-stacks"

UNSTORED = ("pkl", "json")
"""Extensions of the failure files that a rank could not write, in writing order."""
UNSTORED_BYTES_MAX = 48 << 10

UNSHARED = "this node cannot give each run its own user namespace, so runs do not share an interpreter"
"""Reason for cold starts of a server's runs on a node.

The agent appends the kernel's error in parentheses.
"""

_INTEGER_MAX = 2**63 - 1
_SHOWN_MAX = 100

Message = dict[str, object]
Report = Callable[[Message], None]
"""Function that sends a message to the supervisor."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ns() -> int:
    """Return the nanoseconds since boot."""
    return time.clock_gettime_ns(_CLOCK)


def encode(message: Message) -> bytes:
    """Return a message as JSON bytes."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(body: bytes) -> Message:
    """Decode a message. Raises ValueError unless the bytes contain a JSON object."""
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("a message must be an object")
    return message


def integer(message: Message, key: str) -> int:
    """Return a message's integer field, or raise ValueError."""
    value = message.get(key)
    if not isinstance(value, int) or not -_INTEGER_MAX <= value <= _INTEGER_MAX:
        raise ValueError(f"field {key!r} must be an integer, not {str(value)[:_SHOWN_MAX]}")
    return value


def text(message: Message, key: str) -> str:
    """Return a message's string field, or raise ValueError."""
    value = message.get(key)
    if not isinstance(value, str):
        raise ValueError(f"field {key!r} must be a string, not {value!r}")
    return value


def strings(message: Message, key: str) -> list[str]:
    """Return a message's list of strings, or raise ValueError."""
    values = message.get(key)
    if not isinstance(values, list):
        raise ValueError(f"field {key!r} must be a list, not {values!r}")
    return [str(value) for value in values]
