"""Checks of tracking: where runs would be tracked, and whether that answers. Nothing here keeps a run from working."""

from __future__ import annotations

import shlex

from serverless_gpu.doctor.facts import MachineFacts, TrackingFacts, TrackingServer
from serverless_gpu.doctor.findings import Check, CheckGroup, Finding, about, ok, warning
from serverless_gpu.node.mlflow_server.server import NO_DATABASE, OTHER_VERSION


@about(lambda facts: facts.tracking)
def _where(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
    if tracking.off:
        return ok(f"off: {tracking.off}")
    if not tracking.installed:
        return ok(f"MLflow is not installed for {facts.python}: runs are not tracked")
    if not tracking.uri:
        return ok("in this home's store; `sgpu mlflow` prints the address")
    if tracking.away:
        sentence = f"{tracking.uri} (MLFLOW_TRACKING_URI) does not answer: {tracking.away}"
        return warning(sentence, f"curl {tracking.uri}/health   (or unset MLFLOW_TRACKING_URI: this home's own store)")
    return ok(f"{tracking.uri}, by MLFLOW_TRACKING_URI{'' if tracking.away is None else '; it answers'}")


@about(lambda facts: facts.tracking)
def _servers(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
    found: list[Finding] = []
    for server in tracking.servers:
        if server.problem:
            found += warning(f"{server.uri}: {server.problem}", _mend(server))
        elif server.stage == "ready" and server.away:
            found += warning(f"{server.uri} (pid {server.pid}) does not answer: {server.away}")
        else:
            version = f", MLflow {server.version}" if server.version else ""
            found += ok(f"{server.uri} is {server.stage}{version}")
    return found


def _mend(server: TrackingServer) -> str:
    """Return the command that helps a server that does not come up."""
    again = shlex.join(["sgpu", "mlflow", *([server.store] if server.store else [])])
    if NO_DATABASE in server.problem and server.file:
        return f"{shlex.join(['mv', server.file, f'{server.file}.away'])} && {again}   (a new one is made)"
    if OTHER_VERSION in server.problem:
        python = server.python or "python"
        return f"{shlex.join([python, '-m', 'mlflow', 'db', 'upgrade', server.database])} && {again}   (after a backup)"
    return again


CHECKS = (
    Check(
        code="tracking",
        group=CheckGroup.TRACKING,
        title="Where runs are tracked",
        symptoms=("MLflow at http://… does not answer: …",),
        cause="MLFLOW_TRACKING_URI names a server that is away. Runs go on without it; what was to be written is kept, "
        "and written when it comes back.",
        mend="start that server, or unset MLFLOW_TRACKING_URI",
        probe=_where,
    ),
    Check(
        code="mlflow-server",
        group=CheckGroup.TRACKING,
        title="MLflow's server in front of this home's runs",
        symptoms=(
            "… is not a database; once that file is moved away a new one is made",
            "… was written by another version of MLflow; serve it with that one, or upgrade it, after a backup: …",
            "… has not all of MLflow (no flask; mlflow-skinny is not enough); pip install mlflow",
            "MLflow's server ended (exit code 1): …",
        ),
        cause="The server is the MLflow of the environment that runs were tracked from: a part of it lacks, its "
        "database is another version's or none, or it was ended. It is tried again by itself, less and less often.",
        mend="sgpu doctor   (names the command; then `sgpu mlflow` tries again at once)",
        probe=_servers,
    ),
)
