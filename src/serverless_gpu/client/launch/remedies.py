"""Remedies in the syntax of the place where a request was typed: options of Python, of `sgpu submit`, of a cell magic.

NoSuitableNode(choices) ─▶ ``gpu_type="CPU"`` · ``--gpu-type CPU``, and how the run is queued all the same
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from serverless_gpu.errors import NoSuitableNode, ServerNotConfigured

Syntax = Literal["python", "command line"]
CHOICES_MAX = 4


def explain(error: NoSuitableNode, syntax: Syntax) -> None:
    """Replace an error's hint with one in the syntax of the request."""
    written = [_choice_text(choice, syntax) for choice in error.choices[:CHOICES_MAX]]
    wait = "wait=True" if syntax == "python" else "--wait"
    parts = [f"would work: {' · '.join(written)}"] if written else []
    parts.append(f"{wait} queues the run until a node joins that could serve it")
    error.hint = "; ".join(parts)


def no_server(typed: str, instead: str = "") -> ServerNotConfigured:
    """Return the refusal of `typed`, which needs a server, with an alternative or ""."""
    hint = "`sgpu up` starts one on this machine, `sgpu login` uses one that is there"
    return ServerNotConfigured(
        f"`{typed}` needs a server, and none is configured", hint="; ".join(filter(None, (hint, instead)))
    )


def _choice_text(choice: Mapping[str, int | str], syntax: Syntax) -> str:
    if syntax == "python":
        return ", ".join(
            f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in choice.items()
        )
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in choice.items())
