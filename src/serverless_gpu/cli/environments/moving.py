"""`sgpu env capture` and `sgpu env restore`: into a store, and out of it into a tree of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from serverless_gpu.cli.environments import places
from serverless_gpu.cli.environments.describing import SHORT
from serverless_gpu.cli.environments.meter import Meters
from serverless_gpu.cli.output import print_json
from serverless_gpu.environment.cache import Cache
from serverless_gpu.environment.compression import LEVEL_LOCAL, LEVEL_REMOTE
from serverless_gpu.environment.restoring import export
from serverless_gpu.environment.stores.directory import DirectoryStore
from serverless_gpu.environment.taking import Taken, take
from serverless_gpu.units import format_bytes, format_duration_ms
