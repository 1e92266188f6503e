"""Requests a run's estimated start time from a server, without submitting a run or capturing files.

If the server is unreachable or too old for estimates, the client returns an "unknown" estimate with the reason. If the
server refuses the run, the client raises the server's error.
"""

from __future__ import annotations

import functools
import os

import msgspec

from serverless_gpu.client.estimating import Estimate, to_estimate, unknown_estimate
from serverless_gpu.client.remote.profile import remote_home
from serverless_gpu.client.remote.server import RemoteServer, server_of
from serverless_gpu.client.remote.submission import choose_pool, environment_of, target
from serverless_gpu.errors import InvalidValue, NotFound, ServerUnavailable
from serverless_gpu.model.spec import Command, Function, RunSpec
from serverless_gpu.wire.runs import EstimateRequest, estimate_of


def estimate(spec: RunSpec) -> Estimate:
    """Return the server's estimate of a run's start time.

    Raise the server's error if the server refuses the run.
    """
    home = remote_home(os.environ)
    server = server_of(home.root, os.environ)
    try:
        return _fetch_estimate(server, spec)
    except ServerUnavailable as error:
        return unknown_estimate(f"the server at {server.profile.url} does not answer: {error.message}")
    except NotFound:
        return unknown_estimate(f"the server at {server.profile.url} is too old for estimates")


def _fetch_estimate(server: RemoteServer, spec: RunSpec) -> Estimate:
    # This call caches the server's version, which `environment_of` also needs.
    server.version(patiently=False)
    environment = environment_of(spec, server)
    travels = environment == "snapshot"
    payload = spec.payload if isinstance(spec.payload, Command) else Function()
    choice = choose_pool(spec, os.environ, functools.partial(server.pools, patiently=False))
    spec = msgspec.structs.replace(choice.applied(spec), environment=environment, payload=payload, tracker=None)
    try:
        answer = server.estimate(EstimateRequest(spec=spec, target=target(travels=travels), snapshot=travels))
    except InvalidValue as error:
        raise choice.told(error) from error.__cause__
    found = to_estimate(estimate_of(answer), answer.now_ns, answer.cost)
    return msgspec.structs.replace(found, policy=answer.policy, budgets=answer.budgets)
