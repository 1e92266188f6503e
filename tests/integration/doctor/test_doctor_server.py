"""The doctor's checks of the server: none, one that is well, and each thing that can be wrong with one."""

from __future__ import annotations

import os
from pathlib import Path

from serverless_gpu.client.remote.profile import ServerProfile, write_profile
from serverless_gpu.doctor.probes.servers import look_at_server


def test_a_server_that_is_away_and_a_token_that_others_can_read(home: Path) -> None:
    write_profile(home, ServerProfile(url="http://127.0.0.1:9", token="t", embedded=True))
    (home / "server.json").chmod(0o644)
    seen = look_at_server(os.environ)
    assert seen.away.startswith("the server at http://127.0.0.1:9 does not answer")
    assert (seen.is_private, seen.version, seen.embedded) == (False, "", True)
