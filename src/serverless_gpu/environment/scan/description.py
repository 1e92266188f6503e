"""What an interpreter said about itself (`interpreter.py`), as a checked value."""

from __future__ import annotations

import os

import msgspec

from serverless_gpu.environment.documents import Interpreter
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.json_codec import from_builtins


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A Python process, as far as it matters for what it can import.

    Attributes:
        implementation: ``cpython``.
        version: three numbers.
        abi: what extension modules are built for.
        platform: for example ``linux-x86_64``.
        glibc: its version, or "".
        executable: the interpreter.
        base_executable: the interpreter a virtual environment was made from, else the same.
        prefix: `sys.prefix`.
        base_prefix: `sys.base_prefix`.
        purelib: where pip installs to.
        platlib: where pip installs extension modules to; nearly always the same.
        stdlib: the standard library.
        platstdlib: its part for this platform.
        site_directories: directories whose ``.pth`` files are read at start-up.
        sys_path: as it was when asked.
        cwd: what "" on `sys.path` stands for; "" when it was removed.
        flags: those of `sys.flags` that change `sys.path`.
        loaded: files of the modules that were imported.
        variables: names of the start-up variables that were set.
        home: the user's home directory.
        own_home: ours, never captured.
    """

    implementation: str
    version: str
    abi: str
    platform: str
    executable: str
    base_executable: str
    prefix: str
    base_prefix: str
    purelib: str
    platlib: str
    stdlib: str
    platstdlib: str
    sys_path: tuple[str, ...]
    glibc: str = ""
    site_directories: tuple[str, ...] = ()
    cwd: str = ""
    flags: dict[str, int] = {}
    loaded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    home: str = ""
    own_home: str = ""

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
    """Return what `describe` said as a value.

    Raises:
        EnvironmentUnsupported: something is missing or of another type.
    """
    try:
        return from_builtins(described, Description)
    except msgspec.ValidationError as error:
        raise EnvironmentUnsupported(
            f"the interpreter's description of itself cannot be read: {error}",
            hint="is there another version of serverless-gpu in that environment?",
        ) from None
