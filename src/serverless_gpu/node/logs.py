"""What ranks write: read from pipes, stored byte-exact, passed on as text.

    rank's fd 1, 2 ──pipe──▶ RankLog ─▶ logs/<rank>.stdout, .stderr     (every byte, up to a limit per rank)
                                     ├▶ tail                            (last lines, for the exception)
                                     └▶ text to whoever watches         (dropped first when they do not read)

A pipe is drained until it would block or a bound per turn is reached, so that one rank's flood does not starve the
others. The end of file is not waited for: a grandchild may hold the pipe open for ever.
"""

from __future__ import annotations

import codecs
import contextlib
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

STORED_BYTES_MAX = 1 << 30
_READ_BYTES = 1 << 16
_READS_PER_TURN = 16
_CLOSING_TURNS_MAX = 64
_TAIL_LINES = 50
_TAIL_LINE_CHARACTERS_MAX = 2_000

Listener = Callable[[int, str, str], None]


class RankLog:
    """The output of one rank.

    Args:
        rank: global rank.
        directory: where the files go.
        listener: called with rank, stream and text, if somebody watches this rank.
    """

    def __init__(self, rank: int, directory: Path, listener: Listener | None) -> None:
        self.rank = rank
        self.dropped_bytes = 0
        self._streams = {name: _Stream(name, directory / f"{rank}.{name}") for name in ("stdout", "stderr")}
        self._listener = listener
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._stored = 0

    def write_ends(self) -> tuple[int, int]:
        """Return the descriptors for the rank's stdout and stderr."""
        return self._streams["stdout"].write_fd, self._streams["stderr"].write_fd

    def close_write_ends(self) -> None:
        """Close our copies once the rank has its own."""
        for stream in self._streams.values():
            stream.close_write_end()

    def readers(self) -> list[tuple[int, Callable[[], bool]]]:
        """Return descriptors to watch and what to call when they are readable (False: end of file)."""
        return [(stream.read_fd, lambda s=stream: self._drain(s)) for stream in self._streams.values()]  # type: ignore[misc]  # mypy does not type a lambda's default

    def tail(self) -> str:
        """Return the last lines, both streams in order of arrival."""
        return "\n".join([*self._tail, *(stream.partial for stream in self._streams.values() if stream.partial)])

    def close(self) -> None:
        """Take what is in the pipes now and close everything."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):
                for _ in range(_CLOSING_TURNS_MAX):  # whoever writes on may write faster than we read
                    if not self._drain(stream) or not stream.more:
                        break
            stream.close()

    def _drain(self, stream: _Stream) -> bool:
        stream.more = False
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(stream.read_fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._take(stream, data)
        stream.more = True
        return True

    def _take(self, stream: _Stream, data: bytes) -> None:
        room = STORED_BYTES_MAX - self._stored
        kept = stream.store(data[:room]) if room > 0 else 0
        self._stored += kept
        self.dropped_bytes += len(data) - kept
        text = stream.decoder.decode(data)
        lines = (stream.partial + text).split("\n")
        stream.partial = lines.pop()[-_TAIL_LINE_CHARACTERS_MAX:]
        self._tail.extend(line[-_TAIL_LINE_CHARACTERS_MAX:] for line in lines[-_TAIL_LINES:])
        if self._listener is not None and text:
            self._listener(self.rank, stream.name, text)


class _Stream:
    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_fd, False)
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.more = False
        self.partial = ""  # an unfinished line; the streams' must not be glued together
        self._file: int | None = None
        self._path = path

    def store(self, data: bytes) -> int:
        """Append to the file and return how much was kept; a full disk loses log bytes, not the run."""
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            return os.write(self._file, data)
        except OSError:
            return 0

    def close_write_end(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        self.close_write_end()
        os.close(self.read_fd)
        if self._file is not None:
            os.close(self._file)
