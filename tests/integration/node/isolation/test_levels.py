"""The trials of the isolation levels, with real uids and namespaces."""

from __future__ import annotations

import os

import pytest

from serverless_gpu.node.isolation import levels


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try the levels")
def test_this_machine_offers_both_levels() -> None:
    assert levels.measure({}).level == "sandbox"
    assert levels._rehearse("own_uid", 1_900_000_009, {}) == ""
