"""Secrets of runs: passwords and keys that are separate from code, variables and arguments.

    secrets=["HF_TOKEN"]                    a file in the run: serverless_gpu.runtime.secret("HF_TOKEN")
    secrets={"HF_TOKEN": "HF_TOKEN"}        the file, and a variable of each rank, which child processes inherit

Each run names its secrets. When the server places an attempt, the server pins the versions of the run's secrets. The
attempt uses the pinned versions until its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.errors import InvalidOption, InvalidValue

SECRETS_MAX = 32
"""Maximum number of secrets of one run."""
VALUE_BYTES_MAX = 64 << 10
DIRECTORY = "SGPU_SECRETS_DIR"
"""Environment variable with the path of the directory that contains one file for each secret of a run."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_OURS = ("SGPU_", "SERVERLESS_GPU_")


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """Pinned version of a secret for one attempt."""

    name: str
    version: int  # Version number of the secret, counted from 1.
    team: str = ""  # Team that owns the secret, or "" for a secret of the run's owner.

    @property
    def text(self) -> str:
        """Return the name and version, such as ``HF_TOKEN@3`` or ``search/HF_TOKEN@3`` for a team's secret."""
        return f"{self.team}/{self.name}@{self.version}" if self.team else f"{self.name}@{self.version}"


class DeliveredSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """Secrets of a run that its node has already received."""

    directory: str  # Directory with one file for each secret.
    texts: tuple[str, ...]  # Names and versions of the secrets, for display.
    # Environment variables by secret name, for secrets that ranks also receive as variables.
    variables: dict[str, str] = {}
    note: str = ""  # Note on the secrets for the receipt, or "".


def check_name(name: str) -> str:
    """Return a secret's name, which is also its file name. Raises InvalidValue if invalid."""
    if not _NAME.fullmatch(name):
        hint = "use up to 64 letters, digits and _ . -, beginning with a letter or _"
        raise InvalidValue(f"a secret cannot be named {name[:80]!r}", hint=hint)
    return name


def check_value(name: str, value: bytes) -> bytes:
    """Return a secret's value unchanged if valid. Raises InvalidValue for an empty or too long value."""
    if not 0 < len(value) <= VALUE_BYTES_MAX:  # Callers stop reading a value at the limit.
        has = f"more than {VALUE_BYTES_MAX} bytes" if value else "no bytes"
        raise InvalidValue(f"secret {name} has {has}", hint=f"a secret has 1 to {VALUE_BYTES_MAX} bytes")
    return value


def check_variable(name: str, value: bytes) -> bytes:
    """Return a secret's value for an environment variable. Raises InvalidValue for zero bytes."""
    if b"\0" in value:
        raise InvalidValue(
            f"secret {name} contains a zero byte and cannot be a variable", hint="read the secret from its file"
        )
    return value


def check(names: Sequence[str], variables: Mapping[str, str]) -> None:
    """Check the secrets of a run, where `variables` maps secret names to variables. Raises InvalidValue."""
    if len(names) > SECRETS_MAX:
        raise InvalidValue(f"a run with {len(names)} secrets exceeds the limit of {SECRETS_MAX} secrets")
    for name in names:
        check_name(name)
    if len(set(names)) != len(names):
        raise InvalidValue("the run names a secret twice")
    for name, variable in variables.items():
        if name not in names:
            raise InvalidValue(
                f"the variable {variable[:80]!r} refers to the secret {name[:80]!r}, which the run does not name"
            )
        if not _VARIABLE.fullmatch(variable) or variable.startswith(_OURS):
            raise InvalidValue(
                f"a secret cannot be the variable {variable[:80]!r}", hint="use a variable such as HF_TOKEN"
            )


def read(value: object) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the secret names and variables from a user's ``secrets=`` option."""
    if isinstance(value, Mapping):
        named = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        named = [(name, None) for name in value]
    else:
        raise InvalidOption(f"secrets must be a list of names, or a dictionary from names to variables, not {value!r}")
    if not all(isinstance(name, str) and isinstance(variable, str | None) for name, variable in named):
        raise InvalidOption(f"secrets must be names, or names and variables, not {value!r}")
    names = tuple(name for name, _ in named)
    variables = {name: variable for name, variable in named if variable is not None}
    check(names, variables)
    return names, variables
