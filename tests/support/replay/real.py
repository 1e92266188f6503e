"""Where real traces are, for tests that need them: the directory in `SGPU_TRACES`; without it they are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TRACES = Path(os.environ.get("SGPU_TRACES", "/nonexistent"))

needs_traces = pytest.mark.skipif(not TRACES.is_dir(), reason="SGPU_TRACES names no directory with traces")
