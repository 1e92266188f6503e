"""The validated description that an interpreter gives of itself (`interpreter.py`)."""

from __future__ import annotations

import os

import msgspec

from serverless_gpu.environment.documents import Interpreter
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.json_codec import from_builtins


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a Python process that determine the modules that it can import."""

    implementation: str  # ``cpython``
    version: str
    abi: str
    platform: str  # platform tag of the interpreter, for example ``linux-x86_64``
    executable: str
    base_executable: str
    prefix: str
    base_prefix: str
    purelib: str
    platlib: str
    stdlib: str
    platstdlib: str
    sys_path: tuple[str, ...]  # Entries of `sys.path` when the interpreter described itself.
    glibc: str = ""  # Version of glibc, or "" for another C library.
    site_directories: tuple[str, ...] = ()  # Directories whose ``.pth`` files the interpreter reads at start-up.
    cwd: str = ""  # Current directory, for which `sys.path` contains "", or "" for a deleted directory.
    flags: dict[str, int] = {}
    loaded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    home: str = ""
    own_home: str = ""  # home directory of serverless-gpu, which a capture always leaves out

    @property
    def interpreter(self) -> Interpreter:
        """Return the interpreter that a snapshot of this environment requires."""
        return Interpreter(
            implementation=self.implementation,
            version=self.version,
            abi=self.abi,
            platform=self.platform,
            glibc=self.glibc,
        )

    def search_path(self) -> tuple[str, ...]:
        """Return `sys.path` as unique absolute paths, replacing "" with the current directory."""
        entries = (os.path.join(self.cwd, entry) for entry in self.sys_path if entry or self.cwd)
        return tuple(dict.fromkeys(os.path.normpath(entry) for entry in entries if os.path.isabs(entry)))

    def key(self) -> bytes:
        """Return a key that identifies the environment, independent of the time of the description."""
        return msgspec.msgpack.encode(
            (self.interpreter, self.executable, self.prefix, self.purelib, self.search_path())
        )


def read_description(described: dict[str, object]) -> Description:
    """Validate the data from `describe`, and return them as a `Description`."""
    try:
        return from_builtins(described, Description)
    except msgspec.ValidationError as error:
        raise EnvironmentUnsupported(
            f"the interpreter's description of itself is not valid: {error}",
            hint="install the same version of serverless-gpu in the environment",
        ) from None
