"""Large outputs on their way to the server, in a thread of their own: reports go on meanwhile.

    hash in parts ─▶ which of them are missing? ─▶ send these ─▶ the file is named by its parts in the next report

An interrupted upload goes on with the missing parts. The node's copy stays until the attempt is settled. Failure cases:
the server's store answers with errors, or slowly (tried again for `upload_s`, then `failed` says what was in the way);
the file is gone or changes while it is read (reported at once: no part of it is reliable).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from blake3 import blake3

from serverless_gpu import faults
from serverless_gpu.errors import ServerlessGpuError
from serverless_gpu.model.spec import BLOB_PART_BYTES, BlobReference
from serverless_gpu.node.uplink.server import Backoff, UplinkServer
from serverless_gpu.node.uplink.shipment import OutputFile
from serverless_gpu.units import format_bytes
from serverless_gpu.wire.attempts import File
from serverless_gpu.wire.blobs import DigestList

_ASKED_AT_ONCE = 1_000


class Upload:
    """The large outputs of one attempt."""

    def __init__(self, outputs: Sequence[OutputFile], server: UplinkServer, token: Callable[[], str]) -> None:
        self.files: dict[str, File] = {}  # whole on the server
        self.problem = ""  # what was in the way last, or ""
        self.lost = ""  # why it can never be sent, or ""
        self._outputs = outputs
        self._server = server
        self._line = server.line(token)
        self._sent_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether everything is on the server."""
        return len(self.files) == len(self._outputs)

    def sentence(self) -> str:
        """Return how far it is."""
        total = sum(output.size for output in self._outputs)
        return f"sending results to the server: {format_bytes(min(self._sent_bytes, total))} of {format_bytes(total)}"

    def close(self) -> None:
        """Give up."""
        self._ended.set()
        self._line.close()

    def _run(self) -> None:
        for output in self._outputs:
            backoff, problem = Backoff(), None
            while not self._ended.is_set():
                try:
                    self._send(output)
                except OSError as error:
                    self.lost = f"{output.path} cannot be read: {error.strerror or error}"
                    return
                except ServerlessGpuError as error:
                    if type(error) is not problem:  # one sentence for one problem, whatever numbers are in it
                        self.problem, problem = error.message, type(error)
                    self._server.look_again()
                    self._ended.wait(backoff.next_s())
                else:
                    self.problem = ""
                    break
        self._line.close()

    def _send(self, output: OutputFile) -> None:
        parts = _digests(output.path, output.size)
        missing: set[str] = set()
        for start in range(0, len(parts), _ASKED_AT_ONCE):
            asked = DigestList(digests=tuple(dict.fromkeys(parts[start : start + _ASKED_AT_ONCE])))
            missing.update(self._line.get().ask("POST", "/blobs/missing", asked, answer=DigestList).digests)
        before = self._sent_bytes
        try:
            with output.path.open("rb") as file:
                for number, digest in enumerate(parts):
                    if digest in missing:
                        file.seek(number * BLOB_PART_BYTES)
                        self._line.get().put(f"/blobs/{digest}", file.read(BLOB_PART_BYTES))
                        missing.discard(digest)
                    self._sent_bytes += min(BLOB_PART_BYTES, output.size - number * BLOB_PART_BYTES)
        except ServerlessGpuError:
            self._sent_bytes = before
            raise
        faults.reach("after_parts_before_report")
        blob = BlobReference(size=output.size, parts=parts)
        self.files[output.name] = File(name=output.name, size=output.size, blob=blob)


def _digests(path: Path, size: int) -> tuple[str, ...]:
    """Return the digest of each part; raises OSError for an unreadable or changed file."""
    parts, read = [], 0
    with path.open("rb") as file:
        while data := file.read(BLOB_PART_BYTES):
            parts.append(blake3(data).hexdigest())
            read += len(data)
    if read != size:
        raise OSError(f"it has {read} bytes and had {size}")
    return tuple(parts)
