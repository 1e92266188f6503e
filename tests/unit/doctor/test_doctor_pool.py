"""What the doctor says of the pool's Ray: who gets in, where it listens, whether a rank could end it."""

from __future__ import annotations

import pytest

from serverless_gpu.doctor.facts import ListeningPort, MachineFacts, PoolFacts
from serverless_gpu.doctor.probes import servers
from tests.support.doctor.diagnosed import FAILED, OK, UNKNOWN, WARNING, found, one
from tests.support.golden import golden

GCS = ListeningPort(port=7900, address="*", process="gcs_server")
RAYLET = ListeningPort(port=7901, address="*", process="raylet")
FINE = PoolFacts(
    directory="/home/ada/.serverless_gpu/ray",
    address="10.0.0.6",
    version="2.60.0",
    listeners=(GCS, RAYLET, ListeningPort(port=7905, address="127.0.0.1", process="ray::Agent")),
    addresses=("10.0.0.6",),
    processes=5,
)
CODES = ("pool-token", "pool-version", "pool-ports", "pool-fence")


def said(code: str, **changes: object) -> tuple[object, str, str]:
    fields = {name: getattr(FINE, name) for name in FINE.__struct_fields__}
    return one(code, MachineFacts(pool=PoolFacts(**{**fields, **changes})))


@pytest.mark.parametrize("code", CODES)
def test_a_machine_that_is_in_no_pool_has_nothing_said(code: str) -> None:
    assert found(code, MachineFacts(pool=PoolFacts())) == []


def test_a_pool_that_is_fine() -> None:
    assert said("pool-token") == (OK, golden("doctor.doctor_pool.ray-asks-everybody"), "")
    assert said("pool-version") == (OK, "Ray 2.60.0, 5 processes", "")
    assert said("pool-ports") == (OK, golden("doctor.doctor_pool.ray-listens-10"), "")
    sentence = "`ray stop` in a rank cannot end this machine's Ray, because ranks cannot signal Ray's processes"
    assert said("pool-fence") == (OK, sentence, "")


def test_a_ray_that_asks_nobody_is_a_failure() -> None:
    sentence = "any host can run code on Ray processes without a token: raylet"
    mend = "sgpu stop   (then start `sgpu up` or `sgpu join` again)"
    assert said("pool-token", without_token=("raylet",)) == (FAILED, sentence, mend)


def test_a_token_that_others_can_read_is_a_failure() -> None:
    path = "/home/ada/.serverless_gpu/ray/token"
    problem = "the file's mode is 0644, so others can read it"
    assert said("pool-token", token_problem=problem) == (
        FAILED,
        golden("doctor.doctor_pool.ray-token", path=path, problem=problem),
        f"chmod 600 {path}",
    )


def test_what_cannot_be_seen_is_unknown() -> None:
    assert said("pool-token", processes=0)[0] == UNKNOWN


def test_addresses_beside_the_pools_are_named_with_the_ports() -> None:
    sentence = "Ray listens on all addresses, including 192.0.2.7: 7900 gcs_server, 7901 raylet"
    outcome = said("pool-ports", addresses=("10.0.0.6", "192.0.2.7"))
    assert outcome == (WARNING, sentence, golden("doctor.doctor_pool.firewall-lets-pool"))


def test_a_ray_that_is_too_old_is_a_failure() -> None:
    assert said("pool-version", version="2.54.1")[:2] == (FAILED, golden("doctor.doctor_pool.ray-54-runs"))


def test_ranks_that_could_end_it_are_said_and_why() -> None:
    outcome, sentence, _ = said("pool-fence", unfenced="Linux 6.12 or newer with Landlock is required")
    assert outcome == WARNING
    assert sentence == golden("doctor.doctor_pool.ray-stop-rank")


def test_addresses_are_read_as_people_write_them() -> None:
    assert servers.readable_address("0100007F") == "127.0.0.1"
    assert servers.readable_address("00000000") == "*"
    assert servers.readable_address("0" * 32) == "*"
    assert servers.readable_address("0000000000000000FFFF00000A00007F") == "127.0.0.10"
    assert servers.readable_address("00000000000000000000000001000000") == "::1"
