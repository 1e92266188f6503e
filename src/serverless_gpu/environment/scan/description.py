"""The validated self-description of an interpreter (`interpreter.py`)."""

from __future__ import annotations

import os

import msgspec

from serverless_gpu.environment.documents import Interpreter
from serverless_gpu.errors import EnvironmentUnsupported
from serverless_gpu.json_codec import from_builtins


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a Python process that decide which modules it can import."""

    implementation: str  # ``cpython``
    version: str
    abi: str
    platform: str  # platform tag, for example ``linux-x86_64``
    executable: str
    base_executable: str
    prefix: str
    base_prefix: str
    purelib: str
    platlib: str
    stdlib: str
    platstdlib: str
    sys_path: tuple[str, ...]  # `sys.path` at the time of the description.
    glibc: str = ""  # Version of glibc, or "".
    site_directories: tuple[str, ...] = ()  # Directories whose ``.pth`` files Python reads when the interpreter starts.
    cwd: str = ""  # Current directory, which "" on `sys.path` means; "" if the directory was removed.
    flags: dict[str, int] = {}
    loaded: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    home: str = ""
    own_home: str = ""  # home directory of serverless-gpu, which is never captured

    @property
    def interpreter(self) -> Interpreter:
        """Return the interpreter that a snapshot of this environment needs."""
        return Interpreter(
            implementation=self.implementation,
            version=self.version,
            abi=self.abi,
            platform=self.platform,
            glibc=self.glibc,
        )

    def search_path(self) -> tuple[str, ...]:
        """Return `sys.path` as unique absolute paths, with the current directory in place of ""."""
        entries = (os.path.join(self.cwd, entry) for entry in self.sys_path if entry or self.cwd)
        return tuple(dict.fromkeys(os.path.normpath(entry) for entry in entries if os.path.isabs(entry)))

    def key(self) -> bytes:
        """Return a key that is equal for all descriptions of one environment."""
        return msgspec.msgpack.encode(
            (self.interpreter, self.executable, self.prefix, self.purelib, self.search_path())
        )


def read_description(described: dict[str, object]) -> Description:
    """Validate the result of `describe` and return it as a `Description`."""
    try:
        return from_builtins(described, Description)
    except msgspec.ValidationError as error:
        raise EnvironmentUnsupported(
            f"the description that the interpreter printed of itself is not valid: {error}",
            hint="check that the environment has the same version of serverless-gpu",
        ) from None
