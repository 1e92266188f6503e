"""Shares of the queue and usage policies: what was set is what decisions are made by."""

from __future__ import annotations

import functools

import pytest

from serverless_gpu.model.scheduling.values import Pool, QueuePolicy
from serverless_gpu.model.usage_policy import UsagePolicy
from serverless_gpu.server.db.database import Database
from serverless_gpu.server.records import policies, pools
from serverless_gpu.server.records.policies import StoredPolicy
from serverless_gpu.server.records.pools import StoredPool, StoredShare

pytestmark = pytest.mark.any_database


def test_decisions_are_made_by_the_settings_and_the_shares_as_they_are(database: Database) -> None:
    said = QueuePolicy(half_life_s=60.0)
    assert database.read(lambda connection: pools.queue_policy(connection, said)) == said
    for share in (
        StoredShare(kind="user", name="search", weight=3.0, set_ns=1),
        StoredShare(kind="team", name="search", weight=1.0, set_ns=1),
        StoredShare(kind="team", name="search", weight=70.0, set_ns=2),
    ):
        database.write(functools.partial(pools.put_share, share=share))
    policy = database.read(lambda connection: pools.queue_policy(connection, said))
    assert policy == QueuePolicy(half_life_s=60.0, team_weights={"search": 70.0}, user_weights={"search": 3.0})
    assert database.write(lambda connection: pools.remove_share(connection, "user", "search"))
    assert not database.write(lambda connection: pools.remove_share(connection, "user", "search"))
    (left,) = database.read(pools.every_share)
    assert left == StoredShare(kind="team", name="search", weight=70.0, set_ns=2)


def test_a_pool_lends_only_while_it_is_reserved(database: Database) -> None:
    made = StoredPool(name="a", kind=pools.RESERVED, created_ns=1, lends=True, return_s=60.0, isolation="none")
    database.write(lambda connection: pools.put(connection, made))
    assert database.read(lambda connection: pools.find(connection, "a")) == made
    assert made.planned == Pool(name="a", reserved=True, lends=True, return_s=60.0)
    changed = StoredPool(name="a", kind=pools.ON_DEMAND, created_ns=9, lends=True, return_s=60.0)
    database.write(lambda connection: pools.put(connection, changed))
    found = database.read(lambda connection: pools.find(connection, "a"))
    assert found is not None and found.created_ns == 1
    assert found.planned == Pool(name="a", reserved=False, lends=False, return_s=60.0)


def test_a_policy_is_what_was_put_last_under_its_name(database: Database) -> None:
    for policy in (UsagePolicy(), UsagePolicy(pool="research")):
        put = StoredPolicy(name="nightly", policy=policy, set_ns=7)
        database.write(functools.partial(policies.put, policy=put))
    assert database.read(policies.every) == [
        StoredPolicy(name="nightly", policy=UsagePolicy(pool="research"), set_ns=7)
    ]
    assert database.write(lambda connection: policies.remove(connection, "nightly"))
    assert database.read(lambda connection: policies.find(connection, "nightly")) is None
