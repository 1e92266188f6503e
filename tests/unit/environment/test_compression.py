"""A compressor that is used again and again makes the frames that a new one makes: packs keep their names."""

from __future__ import annotations

import pytest

from serverless_gpu.environment.compression import LEVEL_LOCAL, LEVEL_REMOTE, Compressor, compress, decompress


@pytest.mark.parametrize("level", [LEVEL_LOCAL, LEVEL_REMOTE])
def test_22C1_frames_are_the_same_whatever_was_compressed_before(level: int) -> None:
    compressor = Compressor(level)
    for content in (b"a" * 100_000, b"b", bytes(range(256)) * 5000, b"a" * 100_000):
        frame = compressor.compress(memoryview(content))
        assert frame == compress(content, level, checksum=False)
        assert decompress(frame, len(content)) == content
