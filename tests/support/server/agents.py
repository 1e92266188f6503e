"""Helpers of the tests of agents that other tests use as well."""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from serverless_gpu.model.access_control import NodeIdentity
from serverless_gpu.model.hardware import parse_fake
from serverless_gpu.model.lifecycle.attempt import State
from serverless_gpu.model.lifecycle.run_lifecycle import AttemptEnded, GivenUp, StopAsked
from serverless_gpu.model.spec import Resources
from serverless_gpu.server.composition import Services, make_scheduler
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.core.server_key import sha256
from serverless_gpu.server.db import tables
from serverless_gpu.server.lifecycle import transitions
from serverless_gpu.server.lifecycle.transitions import Note, TransitionResult
from serverless_gpu.server.records import nodes, runs
from serverless_gpu.server.records.runs import NewRun, StoredRun
from serverless_gpu.wire.agents import AgentHello
from serverless_gpu.wire.base import PROTOCOL
from tests.support.server.stored import new_run

NODE = Caller(name="node", kind="service", role="agent")
ADMIN = Caller(name="alice", role="admin")
OTHER = Caller(name="other", kind="service", role="agent")
H100 = parse_fake("H100:8")


def hello(name: str = "n1", *, boot: str = "b1", machine: str = "m1", **fields: object) -> AgentHello:
    said = AgentHello(
        name=name,
        machine=machine,
        boot_id=boot,
        version="1",
        protocol=PROTOCOL,
        python="3.11",
        platform="linux-x86_64",
        devices=H100,
    )
    return msgspec.structs.replace(said, **fields)


def submit(services: Services, gpus: int = 2) -> str:
    new = new_run(resources=Resources(gpus=gpus, gpu_type="H100"))
    sealed = services.sealer.seal(b'{"environ":{"A":"1"}}', about=new.id)
    new = msgspec.structs.replace(new, context_sealed=sealed)
    return _insert(services, new)


def _insert(services: Services, new: NewRun) -> str:
    at_ns = services.clock.wall_ns()
    services.database.write(lambda connection: runs.insert(connection, new, at_ns=at_ns))
    return new.id


def placed(services: Services, gpus: int = 2) -> str:
    run_id = submit(services, gpus)
    make_scheduler(services).tick(services.clock.boottime_ns())
    assert find(services, run_id).state is State.STARTING
    return run_id


def find(services: Services, run_id: str) -> StoredRun:
    run = services.database.read(lambda connection: runs.find(connection, run_id))
    assert run is not None
    return run


def tell(services: Services, run_id: str, event: StopAsked | AttemptEnded | GivenUp) -> None:
    note = Note(at_ns=services.clock.wall_ns())

    def work(connection: sa.Connection) -> TransitionResult:
        run = runs.find(connection, run_id)
        assert run is not None
        return transitions.apply(connection, run, event, note=note)

    services.announcer.announce(services.database.write(work))


def token_of(services: Services, identifier: str) -> Caller:
    """Return a caller with a token of a node's own, for the first node that says hello with it."""
    at_ns = services.clock.wall_ns()
    row = {"id": identifier, "sha256": sha256(identifier), "principal": NODE.name, "created_ns": at_ns}

    def work(connection: sa.Connection) -> None:
        connection.execute(tables.tokens.insert(), row)
        nodes.bind(connection, identifier, NodeIdentity(name="", machine=""), by="server", at_ns=at_ns)

    services.database.write(work)
    return msgspec.structs.replace(NODE, token_id=identifier)
