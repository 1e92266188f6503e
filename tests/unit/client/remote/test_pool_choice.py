"""Which pool a remote run asks for: code, then variables, in one order."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from serverless_gpu.client.remote.submission import POOL, POOL_ID, USE_RESERVED, PoolChoice, choose_pool
from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.wire.nodes import PoolView
from tests.support.golden import golden

ALL = {POOL: "mine", POOL_ID: "theirs", USE_RESERVED: "true"}


def pool(name: str, kind: str = "reserved") -> PoolView:
    return PoolView(name=name, kind=kind, nodes=(), total={}, free={}, queued=0)


def unasked() -> list[PoolView]:
    raise AssertionError("the server was asked")


@pytest.mark.parametrize(
    ("spec", "environ", "chosen"),
    [
        (RunSpec(pool="said"), ALL, PoolChoice("said")),
        (RunSpec(pool="said", policy="nightly"), ALL, PoolChoice("said")),
        (RunSpec(policy="nightly"), ALL, PoolChoice(None)),
        (RunSpec(), ALL, PoolChoice("mine", POOL)),
        (RunSpec(), {**ALL, POOL: ""}, PoolChoice("theirs", POOL_ID)),
        (RunSpec(), {POOL_ID: "theirs"}, PoolChoice("theirs", POOL_ID)),
        (RunSpec(), {POOL_ID: "theirs", USE_RESERVED: "False"}, PoolChoice(None, USE_RESERVED)),
        (RunSpec(), {USE_RESERVED: "0"}, PoolChoice(None, USE_RESERVED)),
        (RunSpec(), {USE_RESERVED: ""}, PoolChoice(None)),
        (RunSpec(), {}, PoolChoice(None)),
    ],
)
def test_code_wins_over_variables_and_those_have_an_order(
    spec: RunSpec, environ: Mapping[str, str], chosen: PoolChoice
) -> None:
    assert choose_pool(spec, environ, unasked) == chosen


def test_a_reserved_pool_is_the_only_one_there_is() -> None:
    environ = {USE_RESERVED: "TRUE"}
    there = [pool("default", "on-demand"), pool("gold")]
    assert choose_pool(RunSpec(), environ, lambda: there) == PoolChoice("gold", USE_RESERVED)
    with pytest.raises(InvalidValue, match=re.escape(golden("client.pool_choice.server-none"))):
        choose_pool(RunSpec(), environ, lambda: there[:1])
    with pytest.raises(InvalidValue, match="has 2: gold, silver"):
        choose_pool(RunSpec(), environ, lambda: [*there, pool("silver")])


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(InvalidValue, match="DATABRICKS_USE_RESERVED_GPU_POOL='maybe'"):
        choose_pool(RunSpec(), {USE_RESERVED: "maybe"}, unasked)


def test_a_refusal_names_the_variable_that_named_the_pool() -> None:
    refused = InvalidValue("there is no pool 'mine'", hint="pools: default")
    told = PoolChoice("mine", POOL).told(refused)
    assert (told.message, told.hint) == (golden("client.pool_choice.pool-mine-sgpu"), "pools: default")
    other = InvalidValue("tags are too many")
    assert PoolChoice("mine", POOL).told(other) is other
    assert PoolChoice("mine").told(refused) is refused
