"""Runs the canary on this node and returns its report.

    prepared targets ─▶ victim: a run of one principal ─▶ attacker: a run of another principal tries every attempt
                                                   └────▶ control: the same attempts, without isolation
    afterwards: search for the remains of both ─▶ model/canary.py judges ─▶ CanaryReport

Both runs are ordinary runs of the node: the agent starts them in the isolation level under test, on CPU slots. The
control has the rights of the node's account. As root, more controls succeed. The node needs two free CPU slots. The
network rules of the node apply to the runs and not to the control.

Failure cases: If a run does not start, the report names the problem, and each verdict is unknown. The canary stops both
runs and removes its targets in every case.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import msgspec

from serverless_gpu.ambient import Clock, new_run_id
from serverless_gpu.errors import AgentUnavailable, ServerlessGpuError
from serverless_gpu.model.canary import ATTEMPTS, EGRESS, CanaryReport, CanaryRow, Outcome, Trial, rows
from serverless_gpu.model.egress import EgressPolicy
from serverless_gpu.model.isolation import NONE, Level
from serverless_gpu.node.agent.connection import running_agent
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.canary import inspection
from serverless_gpu.node.canary.runs import (
    FENCE,
    SECRET,
    TOKEN,
    CanaryRun,
    ScratchRun,
    json_lines,
    outcomes,
    program_of,
    started,
)
from serverless_gpu.node.canary.targets import MEMORY_BYTES, new_mark, prepared
from serverless_gpu.node.inside.canary import victim
from serverless_gpu.node.inside.linux import descendants
from serverless_gpu.node.isolation.egress import NodeEgress
from serverless_gpu.node.processes.process_tree import AGENT
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.version import __version__

ATTACKER, VICTIM = "canary attacker", "canary victim"
"""Owners of the canary's runs. Each owner keeps its uid on the node, as every principal does."""
_CONTROL_S = 120.0
_ANSWER_S = 10.0
_LOOK_MS, _LOOKS_MAX = 20, 3_000
_FREE_MEMORY_FACTOR = 4
_SUPERVISOR, _ZYGOTE = "sgpu-supervisor", "sgpu-zygote"
_REACH_LIMIT = "exhaust-memory"
EXHAUST_PROCESSES, EXHAUST_MEMORY = "exhaust-processes", "exhaust-memory-unasked"
OBSERVED = (EXHAUST_PROCESSES, EXHAUST_MEMORY)
"""Attempts without code. The node reads the limits of the runs instead."""


class Examination(NamedTuple):
    """A test by the canary: node, level and targets.

    Attributes:
        services: further targets of attempts, such as ``server_port``.
        egress_problem: reason why the node applies no network rules, "" if the rules are in force, and None without
            isolation.
    """

    node: str
    level: Level
    services: Mapping[str, str] = {}
    egress_problem: str | None = None


def examine(home: Home, clock: Clock, wanted: Examination, environ: Mapping[str, str]) -> CanaryReport:
    """Run the canary on this node and return its report."""
    report = CanaryReport(node=wanted.node, level=wanted.level, at_ns=clock.wall_ns(), version=__version__)
    mark = new_mark()
    try:
        with prepared(home, environ, mark) as targets:
            attempts, controls = _try(home, clock, wanted, {**targets, **wanted.services}, mark, environ)
    except (ServerlessGpuError, OSError) as error:
        return msgspec.structs.replace(report, problem=str(error), rows=rows(wanted.level, {}, {}))
    found = rows(wanted.level, attempts, controls)
    return msgspec.structs.replace(report, rows=with_reason(found, wanted.egress_problem or ""))


def with_reason(found: Iterable[CanaryRow], egress_problem: str) -> tuple[CanaryRow, ...]:
    """Replace the remedy of attempts on the network by the reason why the node has no network rules."""
    return tuple(
        msgspec.structs.replace(row, remedy=egress_problem)
        if egress_problem and row.measure == EGRESS.name and row.verdict == "possible"
        else row
        for row in found
    )


def examine_alone(home: Home, clock: Clock, wanted: Examination, environ: Mapping[str, str]) -> CanaryReport:
    """Run the canary on a machine without a server, with the network rules of an open pool."""
    if wanted.level == NONE:
        return examine(home, clock, wanted, environ)
    url = wanted.services.get("server_url", "")
    verbs = find_spawner(environ, "network")
    egress = NodeEgress(home.root, environ, clock, verbs, server_url=lambda: url, say=lambda _line: None)
    if not egress.problem and verbs.measure_egress().is_loaded:  # A node of this machine already applies its rules.
        return examine(home, clock, wanted._replace(egress_problem=""), environ)
    try:
        return examine(home, clock, wanted._replace(egress_problem=egress.require(EgressPolicy())), environ)
    finally:
        egress.leave()


def _try(
    home: Home, clock: Clock, wanted: Examination, targets: dict[str, object], mark: str, environ: Mapping[str, str]
) -> tuple[dict[str, Trial], dict[str, Trial]]:
    """Return the outcomes of the attempts and of their controls."""
    run_id = new_run_id()
    own = home.attempt(run_id, FENCE)
    targets |= {"own_directory": str(own), "own_facts": str(own / "facts.jsonl"), "own_order": str(own / "spec.json")}
    level, egress = wanted.level, wanted.egress_problem
    of_victim = ScratchRun(new_run_id(), VICTIM, program_of("victim", f"{mark}-victim"), level, egress, None)
    with started(home, clock, of_victim) as other:
        targets |= _victim_targets(home, other, level, mark, environ)
        key = new_key()
        argv = program_of("runner", json.dumps({**targets, "mark": f"{mark}-run", "left_key": key}))
        with started(home, clock, ScratchRun(run_id, ATTACKER, argv, level, egress)) as run:
            observed = {
                EXHAUST_PROCESSES: inspection.process_limit(_await_process(run, f"{mark}-run")),
                EXHAUST_MEMORY: inspection.memory_limit(cast(int, targets["victim_pid"])),
            }
            run.wait()
            attempts = with_remains(trials(outcomes(run.log)), f"{mark}-run", key)
            # The controls use files of the attacker's run, so the run's directory must still exist.
            return {**attempts, **observed}, control(targets, f"{mark}-control")


def control(targets: Mapping[str, object], mark: str) -> dict[str, Trial]:
    """Return the outcomes of the attempts without isolation, in a process of this account."""
    key, names = new_key(), [each.name for each in ATTEMPTS if each.name not in OBSERVED]
    if inspection.available_memory_bytes() < _FREE_MEMORY_FACTOR * MEMORY_BYTES:
        names.remove(_REACH_LIMIT)  # The control must not exhaust the memory of the machine.
    found = {**targets, "mark": mark, "left_key": key, "stem_pid": targets.get("victim_pid"), "only": names}
    leaked = os.open(str(targets["node_file"]), os.O_RDONLY)  # The target of `inherited-descriptor`.
    try:
        done = subprocess.run(
            program_of("runner", json.dumps(found)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath, "HOME": str(targets["runs"])},
            pass_fds=(leaked,),
            timeout=_CONTROL_S,
            check=False,
        )
        lines = done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode("utf-8", "replace")
    finally:
        os.close(leaked)
    found_trials = with_remains(trials(json_lines(lines)), mark, key)
    own = os.getpid()
    return {
        **found_trials,
        EXHAUST_PROCESSES: inspection.process_limit(own),
        EXHAUST_MEMORY: inspection.memory_limit(own),
    }


def trials(lines: Iterable[Mapping[str, object]]) -> dict[str, Trial]:
    """Return the outcomes by attempt that the runner printed."""
    return {
        str(line["attempt"]): Trial(cast(Outcome, line["outcome"]), str(line.get("detail", "")))
        for line in lines
        if {"attempt", "outcome"} <= line.keys()
    }


def with_remains(found: Mapping[str, Trial], mark: str, key: int) -> dict[str, Trial]:
    """Replace the outcome of each attempt that left something by what the node finds after the end."""
    left = inspection.remains(mark, key)
    return {**found, **{name: left[name] for name in left if name in found and found[name].outcome == "possible"}}


def new_key() -> int:
    """Return a random key for a System V object."""
    return secrets.randbelow(1 << 30) + 1


def _victim_targets(
    home: Home, run: CanaryRun, level: Level, mark: str, environ: Mapping[str, str]
) -> dict[str, object]:
    """Wait for the victim's process. Return its targets. Raises AgentUnavailable."""
    pid, name = _await_process(run, f"{mark}-victim"), victim.NAME
    for _ in range(_LOOKS_MAX):
        told = next((line for line in outcomes(run.log) if "port" in line), None)
        if told is not None:
            break
        select.poll().poll(_LOOK_MS)
    else:
        raise AgentUnavailable("the canary's second run printed nothing")
    status = _status(home)
    supervisor = next((each.pid for each in status.attempts if each.run_id == run.run_id), 0)
    launched = next((each.pid or 0 for each in status.zygotes if each.owner == VICTIM and each.pid), 0)
    zygotes = [each for each in (launched, *descendants(launched)) if inspection.name_of(each) == _ZYGOTE]
    place = "/" if level == NONE else find_spawner(environ).principal(VICTIM, home.root).home
    return {
        "victim_pid": pid,
        "victim_name": name,
        "victim_uid": os.stat(f"/proc/{pid}").st_uid,
        "victim_port": f"127.0.0.1:{told['port']}",
        "supervisor_pid": supervisor,
        "supervisor_name": _SUPERVISOR,
        "supervisor_socket": str(home.sockets() / f"{run.run_id}.sock"),
        "agent_pid": status.pid,
        "agent_name": AGENT,
        "zygote_pid": zygotes[0] if zygotes else 0,
        "zygote_name": _ZYGOTE,
        "log": str(run.log),
        "arguments": str(run.directory / "spec.json"),
        "other_facts": str(run.directory / "facts.jsonl"),
        "attempt_token": str(run.directory / TOKEN),
        "result": str(run.directory / "results" / TOKEN),
        # At a level above `none`, only the mount namespace of the run shows the secret.
        "secret": f"{'' if level == NONE else f'/proc/{pid}/root'}{told['secrets']}/{SECRET}",
        "other_home": os.path.join(place, f"{mark}-victim"),
    }


def _await_process(run: CanaryRun, mark: str) -> int:
    """Return the pid of a run's program as soon as it has started. Raises AgentUnavailable."""
    for _ in range(_LOOKS_MAX):
        found = inspection.marked(mark)
        if found:
            return found[0]
        if run.ended():
            break
        select.poll().poll(_LOOK_MS)
    raise AgentUnavailable(
        f"the canary's run {run.run_id} did not start{run.problem()}",
        hint="free two CPU slots of the node, or read the agent's log",
    )


def _status(home: Home) -> protocol.Status:
    connection = running_agent(home)
    if connection is None:
        raise AgentUnavailable("the agent of this node ended during the canary")
    channel, _ = connection
    with contextlib.closing(channel):
        channel.sock.settimeout(_ANSWER_S)
        protocol.send(channel, protocol.StatusRequest())
        received = protocol.receive(channel)
    if received is None or not isinstance(received[0], protocol.Status):
        raise AgentUnavailable("the agent of this node did not answer")
    return received[0]
