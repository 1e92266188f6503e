"""What is installed in an environment, apart from the project's own code: is it the same in two of them?

    snapshot ─ roots that are not code ─ members that bring something to import ─▶ Packages: address → name, version

The project's code may differ: it lies in roots of its own. A distribution that brings nothing to import is left out,
because an editable install of the project is one: its metadata says which version of the project it is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from serverless_gpu.environment.documents import Snapshot

_TOLD_MAX = 5


class Packages(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed."""

    python: str
    units: dict[str, str]


def packages_of(snapshot: Snapshot) -> Packages:
    """Return what is installed in an environment."""
    python = snapshot.interpreter
    return Packages(
        python=f"{python.implementation} {python.minor} {python.abi} {python.platform}",
        units={
            member.address: f"{member.name} {member.version}".strip() or "files of no distribution"
            for root in snapshot.roots
            if root.kind != "code"
            for member in root.members
            if member.kind == "unowned" or (member.kind == "distribution" and member.modules)
        },
    )


def are_same(one: Packages, other: Packages) -> bool:
    """Return whether the same is installed in two environments."""
    return one.python == other.python and one.units.keys() == other.units.keys()


def difference(asked: Packages, accepted: Packages) -> str:
    """Return how what is installed differs from what is accepted, in words; "" where it does not."""
    if asked.python != accepted.python:
        return f"{asked.python} is not {accepted.python}"
    more = [label for address, label in asked.units.items() if address not in accepted.units]
    less = [label for address, label in accepted.units.items() if address not in asked.units]
    parts = [f"{_listed(more)} more"] if more else []
    parts += [f"{_listed(less)} less"] if less else []
    return ", ".join(parts)


def _listed(labels: Iterable[str]) -> str:
    there = sorted(labels)
    rest = f" and {len(there) - _TOLD_MAX} others" if len(there) > _TOLD_MAX else ""
    return ", ".join(there[:_TOLD_MAX]) + rest
