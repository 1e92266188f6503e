"""The doctor's checks of the server: none, one that is well, and each thing that can be wrong with one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from serverless_gpu.doctor import server_checks
from serverless_gpu.doctor.facts import CheckOutcome, MachineFacts, ServerFacts, ServerNode
from serverless_gpu.doctor.probes.servers import look_at_server
from serverless_gpu.version import __version__
from tests.support.doctor.diagnosed import FAILED, OK, UNKNOWN, WARNING, found, one

UP = ServerNode(name="n1", state="UP", silent_s=2.0, pool="default")
WELL = ServerFacts(
    url="http://127.0.0.1:7878",
    profile="/h/server.json",
    embedded=True,
    version=__version__,
    protocol=1,
    own_protocol=1,
    clock_ahead_s=0,
    principal="alice (admin)",
    nodes=(UP,),
    closed_pools=("default",),
    levels={"default": "unset"},
    principals=1,
)
AWAY = ServerFacts(url="http://127.0.0.1:7878", profile="/h/server.json", embedded=True, away="it does not answer")
CODES = [check.code for check in server_checks.CHECKS]


def test_a_server_that_is_well_is_well_in_every_way() -> None:
    assert {one(code, MachineFacts(server=WELL))[0] for code in CODES} == {OK}


@pytest.mark.parametrize("server", [ServerFacts(), AWAY, ServerFacts(problem="no", hint="do")])
def test_what_is_not_there_is_said_once(server: ServerFacts) -> None:
    said = [
        finding for code in CODES for finding in found(code, MachineFacts(server=server)) if finding.outcome is not OK
    ]
    assert len(said) == (server != ServerFacts())


@pytest.mark.parametrize(
    ("code", "server", "expected"),
    [
        (
            "server",
            ServerFacts(),
            (OK, "no server for remote=True is configured (start a server with `sgpu up`, or run `sgpu login URL`)"),
        ),
        ("server", ServerFacts(problem="it is no address", hint="h"), (FAILED, "it is no address")),
        ("server", replace(WELL, is_private=False), (FAILED, "other users can read the token in /h/server.json")),
        ("server", replace(WELL, profile=""), (OK, "http://127.0.0.1:7878, by SERVERLESS_GPU_SERVER")),
        ("server-answers", AWAY, (FAILED, "it does not answer")),
        ("server-answers", replace(WELL, unwell=("the disk is full",)), (FAILED, "the disk is full")),
        ("server-token", replace(WELL, principal="", token_problem="it has expired"), (FAILED, "it has expired")),
        (
            "server-protocol",
            replace(WELL, protocol=2),
            (FAILED, "the server uses protocol 2, but this package uses protocol 1"),
        ),
        (
            "server-protocol",
            replace(WELL, version="9"),
            (OK, f"server version 9 and client version {__version__} both use protocol 1"),
        ),
        ("server-isolation", replace(WELL, closed_pools=None), (UNKNOWN, "your role may not list pools")),
        (
            "server-isolation",
            replace(WELL, principals=2),
            (WARNING, "only the first administrator's runs start in default: runs of other principals wait"),
        ),
        (
            "server-isolation",
            replace(WELL, principals=None, closed_pools=(), shared_pools=("default",)),
            (
                FAILED,
                "several principals share one operating-system user in default: each run can read the files of all "
                "other runs",
            ),
        ),
        (
            "server-isolation",
            replace(WELL, principals=None, closed_pools=(), nodes=(replace(UP, unfiltered="nft is missing"),)),
            (
                WARNING,
                "n1 has no network rules: runs reach the server and each service of the node (nft is missing)",
            ),
        ),
        ("server-node-keys", WELL, (OK, "the server knows the key of each node")),
        (
            "server-node-keys",
            replace(WELL, nodes=(replace(UP, has_key=False),)),
            (WARNING, "n1 has no key: a copy of its token is enough to act as n1"),
        ),
        (
            "server-node-keys",
            replace(WELL, nodes=(replace(UP, key_days=366),)),
            (WARNING, "the key of n1 is 366 days old"),
        ),
        (
            "node-isolation",
            replace(WELL, nodes=(replace(UP, isolation="sandbox"),), levels={"default": "sandbox"}),
            (OK, "n1 offers sandbox, pool default needs sandbox"),
        ),
        ("node-isolation", WELL, (OK, "n1 offers none, pool default needs none (isolation unset)")),
        (
            "node-isolation",
            replace(WELL, nodes=(replace(UP, isolation_problem="no root"),), levels={"default": "sandbox"}),
            (WARNING, "n1 offers none, but pool default needs sandbox: no root"),
        ),
        (
            "node-isolation",
            replace(WELL, nodes=(ServerNode(name="n2", state="PENDING"), UP), levels={}),
            (UNKNOWN, "n1 offers none, and your role may not see its pool"),
        ),
        ("server-nodes", replace(WELL, nodes=None), (UNKNOWN, "your role may not list nodes")),
        ("server-nodes", replace(WELL, nodes=()), (FAILED, "no node has joined the server, so no run can start")),
        ("server-nodes", replace(WELL, nodes=(), embedded=False), (WARNING, "no node has joined the server")),
        (
            "server-nodes",
            replace(WELL, nodes=(UP, ServerNode(name="n2", state="SILENT", silent_s=99.4))),
            (WARNING, "n2 is SILENT: silent for 99 s"),
        ),
        (
            "server-nodes",
            replace(WELL, nodes=(replace(UP, state="DRAINING", sentence="starts no new runs: root …", drained=True),)),
            (WARNING, "n1 is DRAINING: starts no new runs: root …"),
        ),
        (
            "server-protocol",
            replace(WELL, protocol=2, protocols=(1, 2)),
            (OK, "the server uses protocol 2, but still accepts protocol 1: upgrade this package soon"),
        ),
        (
            "server-nodes",
            replace(WELL, nodes=(replace(UP, clock="has a clock that is 1 h 00 min ahead of the server's"),)),
            (
                WARNING,
                "n1 has a clock that is 1 h 00 min ahead of the server's: runs on this node record wrong times",
            ),
        ),
        (
            "server-tls",
            replace(WELL, certificate_left_s=-3600.0),
            (FAILED, "the server's certificate expired 1 h 00 min ago"),
        ),
        (
            "server-tls",
            replace(WELL, certificate_left_s=7200.0),
            (WARNING, "the server's certificate expires in 2 h 00 min"),
        ),
        (
            "server-tls",
            replace(WELL, url="https://gpu.internal"),
            (UNKNOWN, "the doctor could not read the server's certificate"),
        ),
        (
            "server-tls",
            replace(WELL, certificate_left_s=30 * 86_400.0),
            (OK, "the server's certificate expires in 30 days"),
        ),
        ("server-clock", replace(WELL, clock_ahead_s=None), (UNKNOWN, "the server did not send its time")),
        (
            "server-clock",
            replace(WELL, clock_ahead_s=7),
            (WARNING, "the server's clock is 7 s ahead of this machine's clock"),
        ),
        (
            "server-clock",
            replace(WELL, clock_ahead_s=-90),
            (FAILED, "the server's clock is 90 s behind this machine's clock"),
        ),
    ],
)
def test_what_is_wrong_with_a_server(code: str, server: ServerFacts, expected: tuple[CheckOutcome, str]) -> None:
    assert one(code, MachineFacts(server=server))[:2] == expected


def test_a_home_without_a_server(home: Path) -> None:
    assert look_at_server(os.environ) == ServerFacts()


def test_a_profile_that_cannot_be_used(home: Path) -> None:
    (home / "server.json").write_text("{")
    assert "is invalid: " in look_at_server(os.environ).problem
    without_token = {**os.environ, "SERVERLESS_GPU_SERVER": "http://127.0.0.1:9"}
    assert "SERVERLESS_GPU_TOKEN is not" in look_at_server(without_token).problem
