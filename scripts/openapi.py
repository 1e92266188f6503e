"""Writes `docs/openapi.json`, the description of the server's API, from its routes (`make docs`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from serverless_gpu.server.composition import api_routes
from serverless_gpu.server.http.openapi import document

PAGE = Path(__file__).resolve().parent.parent / "docs" / "openapi.json"


def text() -> str:
    """Return the expected text of the page."""
    return json.dumps(document(api_routes()), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the page."""
    PAGE.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
