"""What an interpreter said about itself (`interpreter.py`), as a checked value."""

from __future__ import annotations

import os

import msgspec

from serverless_gpu.environment.documents import Interpreter
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.json_codec import from_builtins


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A Python process, as far as it matters for what it can import."""

    implementation: str  # ``cpython``
    version: str
    abi: str
    platform: str  # for example ``linux-x86_64``
    executable: str
    base_executable: str
    prefix: str
    base_prefix: str
    purelib: str
    platlib: str
    stdlib: str
    platstdlib: str
    sys_path: tuple[str, ...]  # as it was when asked
    glibc: str = ""  # its version, or ""
    site_directories: tuple[str, ...] = ()  # directories whose ``.pth`` files are read at start-up
    cwd: str = ""  # what "" on `sys.path` stands for; "" when it was removed
    flags: dict[str, int] = {}
    loaded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    home: str = ""
    own_home: str = ""  # ours, never captured

    @property
    def interpreter(self) -> Interpreter:
        """Return the Python a snapshot of this is for."""
        return Interpreter(
            implementation=self.implementation,
            version=self.version,
            abi=self.abi,
            platform=self.platform,
            glibc=self.glibc,
        )

    def search_path(self) -> tuple[str, ...]:
        """Return `sys.path` as absolute paths, each once: "" is the current directory."""
        entries = (os.path.join(self.cwd, entry) for entry in self.sys_path if entry or self.cwd)
        return tuple(dict.fromkeys(os.path.normpath(entry) for entry in entries if os.path.isabs(entry)))

    def key(self) -> bytes:
        """Return what two descriptions have in common when they may be the same environment."""
        return msgspec.msgpack.encode(
            (self.interpreter, self.executable, self.prefix, self.purelib, self.search_path())
        )


def read_description(described: dict[str, object]) -> Description:
    """Return what `describe` said as a value."""
    try:
        return from_builtins(described, Description)
    except msgspec.ValidationError as error:
        raise EnvironmentUnsupported(
            f"the interpreter's description of itself cannot be read: {error}",
            hint="is there another version of serverless-gpu in that environment?",
        ) from None
