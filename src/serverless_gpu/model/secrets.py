"""Secrets as runs name them: passwords and keys that are kept apart from code, variables and arguments.

    secrets=["HF_TOKEN"]                    a file in the run: serverless_gpu.runtime.secret("HF_TOKEN")
    secrets={"HF_TOKEN": "HF_TOKEN"}        that, and a variable of each rank: weaker, what a rank starts has it, too

A run names them; which version an attempt gets is pinned when it is placed, and stays what it was for that attempt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from serverless_gpu.errors import InvalidOption, InvalidValue

SECRETS_MAX = 32
"""Secrets of one run."""
VALUE_BYTES_MAX = 64 << 10
DIRECTORY = "SGPU_SECRETS_DIR"
"""The variable that says where a run's secrets lie, one file each."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_OURS = ("SGPU_", "SERVERLESS_GPU_")


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a secret that an attempt has."""

    name: str
    version: int  # 1, 2, 3 … of that name
    team: str = ""  # whose it is, or "" for the run's owner

    @property
    def text(self) -> str:
        """Return what people read: ``HF_TOKEN@3``, of a team ``search/HF_TOKEN@3``."""
        return f"{self.team}/{self.name}@{self.version}" if self.team else f"{self.name}@{self.version}"


class DeliveredSecrets(msgspec.Struct, frozen=True, kw_only=True):
    """A run's secrets, which lie on its node already."""

    directory: str  # where, one file each
    texts: tuple[str, ...]  # names and versions, for people
    variables: dict[str, str] = {}  # secret → variable, of those that ranks have as one
    note: str = ""  # what the receipt says about them, or ""


def check_name(name: str) -> str:
    """Return a name that a secret can have; it is a file's, too. Raises InvalidValue."""
    if not _NAME.fullmatch(name):
        hint = "up to 64 letters, digits and _ . -, the first one a letter or _"
        raise InvalidValue(f"a secret cannot be named {name[:80]!r}", hint=hint)
    return name


def check_value(name: str, value: bytes) -> bytes:
    """Return a value that can be kept. Raises InvalidValue when it is empty, or too long."""
    if not 0 < len(value) <= VALUE_BYTES_MAX:  # of a longer one no more was read than shows that
        has = f"more than {VALUE_BYTES_MAX} bytes" if value else "no bytes"
        raise InvalidValue(f"secret {name} has {has}", hint=f"1 to {VALUE_BYTES_MAX} are possible")
    return value


def check_variable(name: str, value: bytes) -> bytes:
    """Return a value that can be a variable's."""
    if b"\0" in value:
        raise InvalidValue(f"secret {name} has a zero byte, and cannot be a variable", hint="read it from its file")
    return value


def check(names: Sequence[str], variables: Mapping[str, str]) -> None:
    """Refuse secrets that no run can have. Raises InvalidValue. `variables` maps secrets to variables."""
    if len(names) > SECRETS_MAX:
        raise InvalidValue(f"{len(names)} secrets are over the limit of {SECRETS_MAX}")
    for name in names:
        check_name(name)
    if len(set(names)) != len(names):
        raise InvalidValue("a secret is named twice")
    for name, variable in variables.items():
        if name not in names:
            raise InvalidValue(
                f"the variable {variable[:80]!r} is to have the secret {name[:80]!r}, which is not named"
            )
        if not _VARIABLE.fullmatch(variable) or variable.startswith(_OURS):
            raise InvalidValue(f"a secret cannot be the variable {variable[:80]!r}", hint="for example HF_TOKEN")


def read(value: object) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what a user wrote as ``secrets=``: the names, and the variables of those that are to be one."""
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
