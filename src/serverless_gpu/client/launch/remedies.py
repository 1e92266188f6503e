"""Writes error hints in the syntax that the user typed: Python, `sgpu submit` or a cell magic.

NoSuitableNode(choices) ─▶ ``gpu_type="CPU"`` · ``--gpu-type CPU``, and the option that queues the run
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from serverless_gpu.errors import NoSuitableNode, ServerNotConfigured

Syntax = Literal["python", "command line"]
CHOICES_MAX = 4


def explain(error: NoSuitableNode, syntax: Syntax) -> None:
    """Replace an error's hint with a hint in Python or command line syntax."""
    written = [_choice_text(choice, syntax) for choice in error.choices[:CHOICES_MAX]]
    wait = "wait=True" if syntax == "python" else "--wait"
    parts = [f"would work: {' · '.join(written)}"] if written else []
    parts.append(f"{wait} queues the run until a suitable node joins")
    error.hint = "; ".join(parts)


def no_server(typed: str, instead: str = "") -> ServerNotConfigured:
    """Return the error for a command `typed` that needs a server. The error's hint ends with `instead`."""
    hint = "start a server on this machine with `sgpu up`, or connect to an existing server with `sgpu login`"
    return ServerNotConfigured(
        f"`{typed}` needs a server, and none is configured", hint="; ".join(filter(None, (hint, instead)))
    )


def _choice_text(choice: Mapping[str, int | str], syntax: Syntax) -> str:
    if syntax == "python":
        return ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in choice.items()
        )
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in choice.items())
