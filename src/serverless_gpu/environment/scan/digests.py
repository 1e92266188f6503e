"""Computes the SHA-256 digests of project code, and of files whose RECORD is not trusted."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from serverless_gpu.environment.scan.distributions import SCRIPT_BYTES_MAX, normalise_script, unreadable

_THREADS_FROM_BYTES = 4 * 1024 * 1024
"""Number of bytes below which a single thread hashes all files, because starting threads takes longer."""
_THREADS_MAX = 4


class Digest(NamedTuple):
    """Digest and size of a file's content, and the text of a script with a replaced first line."""

    sha256: bytes
    size: int
    text: bytes | None = None


def may_be_script(path: str, size: int) -> bool:
    """Return True if a row's file may be a Python script.

    Only the file's content shows for certain if the file is a script.
    """
    return path.startswith("prefix/bin/") and size <= SCRIPT_BYTES_MAX


def digest_file(file: str, path: str) -> Digest:
    """Return the SHA-256 digest of a file.

    For a Python script in `bin`, the digest covers the script with `#!python` as its first line.
    """
    try:
        with open(file, "rb", buffering=0) as opened:
            if may_be_script(path, os.fstat(opened.fileno()).st_size):
                return digest_script(opened.read())
            digest = hashlib.file_digest(opened, "sha256").digest()
            return Digest(digest, opened.tell())
    except OSError as error:
        raise unreadable(file, error) from error


def digest_script(content: bytes) -> Digest:
    """Return the SHA-256 digest of a file in `bin`.

    For a Python script, the digest covers the script with `#!python` as its first line.
    """
    text = normalise_script(content)
    stands = content if text is None else text
    return Digest(hashlib.sha256(stands).digest(), len(stands), text)


def digest_files(
    files: Sequence[tuple[str, str, int]], done: Callable[[int, int], None] = lambda number, size: None
) -> list[Digest]:
    """Return the SHA-256 digests of files in order. Several threads read and hash large files.

    `files` lists the path, row path and size of each file. During hashing, the function calls `done` repeatedly with
    the numbers of files and bytes read so far.
    """
    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    if threads == 1 or sum(size for _, _, size in files) < _THREADS_FROM_BYTES:
        return [digest_file(file, path) for file, path, _ in files]
    digests: list[Digest] = []
    read = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="digest") as pool:
        try:
            for digest in pool.map(lambda one: digest_file(one[0], one[1]), files):
                digests.append(digest)
                read += digest.size
                if len(digests) % 256 == 0:
                    done(len(digests), read)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return digests
