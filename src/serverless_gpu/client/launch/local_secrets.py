"""Reads and writes the secret files for local runs, which `sgpu secret set --local` creates.

    $SERVERLESS_GPU_HOME/secrets/HF_TOKEN (0600) ──▶ a copy in memory for each run, removed at its end

Only the user can read the secret files. Encryption would not help, because a process that can read the files could also
read the key. A run on a server gets only the server's secrets.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from serverless_gpu.errors import SecretMissing
from serverless_gpu.model.secrets import DeliveredSecrets, check_name, check_value, check_variable
from serverless_gpu.node.attempt import secret_files
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home, storage_error

DIRECTORY = "secrets"


def with_secrets(home: Home, launch: protocol.Launch) -> protocol.Launch:
    """Write a launch's secrets to files in memory, and return the launch with their directory.

    Raise SecretMissing for an unknown secret.
    """
    spec = launch.spec
    # A session executes no user code and needs no secrets.
    if not spec.secrets or launch.idle_timeout_s is not None:
        return launch
    values = {name: _read(home, name) for name in spec.secrets}
    for name in spec.secret_variables:
        check_variable(name, values[name])
    place = secret_files.write(Path(launch.directory), values)
    secrets = DeliveredSecrets(
        directory=str(place), texts=spec.secrets, variables=dict(spec.secret_variables), note=secret_files.note(place)
    )
    return msgspec.structs.replace(launch, secrets=secrets)


def write(home: Home, name: str, value: bytes) -> None:
    """Store a secret in this home directory atomically. Only the user can read the secret file."""
    check_value(check_name(name), value)
    path = home.root / DIRECTORY / name
    beside = path.with_name(f"..{name}-{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.parent.chmod(0o700)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise storage_error(error, path) from None


def names(home: Home) -> list[str]:
    """Return the names of the secrets in this home directory."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in (home.root / DIRECTORY).iterdir() if not path.name.startswith("."))
    return []


def delete(home: Home, name: str) -> None:
    """Delete a secret from this home directory. Raise SecretMissing if the secret does not exist."""
    try:
        (home.root / DIRECTORY / check_name(name)).unlink()
    except FileNotFoundError:
        raise SecretMissing(f"the home directory has no secret {name!r}") from None


def _read(home: Home, name: str) -> bytes:
    path = home.root / DIRECTORY / check_name(name)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise SecretMissing(
            f"the home directory has no secret {name!r}",
            hint=f"set the secret with `sgpu secret set --local {name}`, or use the server's secrets with remote=True",
        ) from None
    except OSError as error:
        raise storage_error(error, path) from None
