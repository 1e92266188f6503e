"""Serves scripts and styles, which never change under their address.

The address contains a digest of all files, so that browsers may keep a file for ever. `VENDORED` pins the files of
other projects by hash. To update one, replace the file, its hash and its licence.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import NamedTuple

from starlette.responses import Response

from serverless_gpu.errors import NotFound, ServerProblem

VENDORED: Mapping[str, str] = {
    "htmx.min.js": "a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",  # htmx 4.0.1, Zero-Clause BSD
    "hx-sse.min.js": "18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",  # the extension of htmx 4.0.1
    "uplot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",  # uPlot 1.6.32, MIT
    "uplot.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
}
"""SHA-256 of each file from another project."""
BUNDLES: Mapping[str, tuple[str, ...]] = {"htmx.js": ("htmx.min.js", "hx-sse.min.js")}
"""Files that the server joins. htmx starts in the first pause between two scripts, and must know its extension then."""
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


class _Asset(NamedTuple):
    data: bytes
    zipped: bytes
    media_type: str


def _media_type(name: str) -> str | None:
    return _TYPES.get(name[name.rfind(".") :])


class Assets:
    """Scripts and styles in memory."""

    def __init__(self) -> None:
        self._files: dict[str, _Asset] = {}
        whole = hashlib.sha256()
        data_of: dict[str, bytes] = {}
        for file in sorted(resources.files(__package__).joinpath("assets").iterdir(), key=lambda one: one.name):
            if _media_type(file.name) is None:
                continue
            data = file.read_bytes()
            pinned = VENDORED.get(file.name)
            if pinned is not None and hashlib.sha256(data).hexdigest() != pinned:
                raise ServerProblem(
                    f"the file {file.name} of the web pages has changed", hint="install serverless-gpu again"
                )
            data_of[file.name] = data
        for bundle, parts in BUNDLES.items():
            data_of[bundle] = b"\n".join(data_of.pop(part) for part in parts)
        for name, data in sorted(data_of.items()):
            whole.update(data)
            self._files[name] = _Asset(data, gzip.compress(data, mtime=0), _media_type(name) or "")
        self.digest = whole.hexdigest()[:16]

    def response(self, name: str, *, accepts: str) -> Response:
        """Return a file, compressed if the browser accepts that."""
        asset = self._files.get(name)
        if asset is None:
            raise NotFound(f"there is no file {name[:64]!r}")
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        if "gzip" in accepts:
            return Response(asset.zipped, headers={**headers, "Content-Encoding": "gzip"}, media_type=asset.media_type)
        return Response(asset.data, headers=headers, media_type=asset.media_type)


@functools.cache
def assets() -> Assets:
    """Return the files of this package."""
    return Assets()
