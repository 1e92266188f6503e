"""Checks of servers: the one that remote calls go to, the Ray of a pool, and MLflow's.

Without a server there is a single line; a machine that is in no pool has no line about one (P-33); nothing about
tracking keeps a run from working. Each check says nothing where one before it says that there is nothing to look at: a
server that is away is one failure, not six.
"""

from __future__ import annotations

import shlex

from serverless_gpu.doctor.facts import (
    Check,
    CheckGroup,
    Finding,
    MachineFacts,
    PoolFacts,
    ServerFacts,
    TrackingFacts,
    TrackingServer,
    about,
    failed,
    ok,
    unknown,
    warning,
)
from serverless_gpu.engines.ray.start_arguments import OLDEST
from serverless_gpu.model.scheduling.wait_messages import REMEDY, REVOKE
from serverless_gpu.node.inside.raycluster.ray_installation import release
from serverless_gpu.node.mlflow_server.server import NO_DATABASE, OTHER_VERSION
from serverless_gpu.units import format_days_ms
from serverless_gpu.version import __version__

_CLOCK_S = 5
_CLOCK_FAILS_S = 60
_SILENT_S = 60.0
_CERTIFICATE_S = 21 * 86_400


@about(lambda facts: facts.server)
def _profile(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if server.problem:
        return failed(server.problem, server.hint)
    if not server.url:
        return ok("none is configured; remote=True needs one: sgpu up, or sgpu login URL")
    if not server.is_private:
        sentence = f"others can read the token in {server.profile}"
        return failed(sentence, f"chmod 600 {server.profile}   (and a new token: sgpu token create, sgpu login)")
    return ok(f"{server.url}, by {server.profile or 'SERVERLESS_GPU_SERVER'}")


@about(lambda facts: facts.server)
def _answers(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if server.away:
        mend = (
            "sgpu up" if server.embedded else f"is it running, and can it be reached? curl {server.url}/api/v1/health"
        )
        return failed(server.away, f"{mend}   (runs that it started go on for 15 minutes)")
    if not server.version:
        return []
    if server.unwell:
        return failed("; ".join(server.unwell), "sgpu server logs --level warning   (on the server's machine)")
    return ok(f"answers, and is well: serverless-gpu {server.version}")


@about(lambda facts: facts.server)
def _token(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if server.token_problem:
        return failed(server.token_problem)
    return ok(f"you are {server.principal}") if server.principal else []


@about(lambda facts: facts.server)
def _protocol(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.version:
        return []
    if server.own_protocol != server.protocol and server.own_protocol not in server.protocols:
        sentence = f"the server speaks protocol {server.protocol}, and this package {server.own_protocol}"
        older = "the server" if server.protocol < server.own_protocol else "this package"
        return failed(sentence, f"upgrade {older}: pip install --upgrade serverless-gpu")
    if server.own_protocol != server.protocol:
        text = f"protocol {server.own_protocol}, which the server takes; its own is {server.protocol}"
        return ok(f"{text}: upgrade this package when it suits")
    if server.version != __version__:
        return ok(f"protocol {server.protocol}; the server is {server.version}, this package {__version__}")
    return ok(f"protocol {server.protocol}")


@about(lambda facts: facts.server)
def _nodes(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.principal:
        return []
    if server.nodes is None:
        return unknown("your role may not look at nodes")
    if not server.nodes:
        return failed("no node has joined: runs wait for ever") if server.embedded else warning("no node has joined")
    found = []
    for node in server.nodes:
        is_silent = node.state != "UP" or (node.silent_s is not None and node.silent_s > _SILENT_S)
        if is_silent or node.sentence:
            mend = f"sgpu node resume {node.name}   (once the work on it is done)" if node.drained else ""
            words = node.sentence or f"not heard for {node.silent_s:.0f} s"
            found += warning(f"{node.name} is {node.state}: {words}", mend)
        if node.clock:
            mend = "timedatectl set-ntp true, there   (limits, leases and charges do not depend on it)"
            found += warning(f"{node.name} {node.clock}: moments that its runs write down are off", mend)
    return found or ok(", ".join(f"{node.name} is up" for node in server.nodes))


@about(lambda facts: facts.server)
def _isolation(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.principal:
        return []
    if server.closed_pools is None:
        return unknown("your role may not look at pools")
    if server.principals is not None and server.principals < 2:
        return ok("one principal starts runs here")
    found = []
    if server.shared_pools:
        sentence = f"several principals share one operating-system user in {', '.join(server.shared_pools)}"
        mend = REVOKE.format(pool=server.shared_pools[0])
        found += warning(f"{sentence}: each run can read what other runs leave", f"{mend}   (runs that run go on)")
    if server.closed_pools:
        sentence = f"only the first administrator's runs start in {', '.join(server.closed_pools)}"
        mend = REMEDY.format(pool=server.closed_pools[0])
        found += warning(f"{sentence}: those of others wait", f"{mend}   (as an administrator who accepts that)")
    return found or ok("no pool has joined yet")


@about(lambda facts: facts.server)
def _clock(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.version:
        return []
    if server.clock_ahead_s is None:
        return unknown("the server did not say what time it is")
    apart = abs(server.clock_ahead_s)
    sentence = f"the server's clock is {apart} s {'ahead of' if server.clock_ahead_s > 0 else 'behind'} this machine's"
    if apart >= _CLOCK_FAILS_S:
        return failed(sentence)
    return warning(sentence) if apart >= _CLOCK_S else ok("as this machine's, within seconds")


@about(lambda facts: facts.server)
def _certificate(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    left_s = server.certificate_left_s
    if left_s is None:
        if not server.version:
            return []
        is_seen = not server.url.startswith("https://")
        return ok("none is needed here: plain HTTP on this machine") if is_seen else unknown("it could not be read")
    apart = format_days_ms(round(abs(left_s) * 1000))
    if left_s <= 0:
        return failed(f"the server's certificate ended {apart} ago")
    sentence = f"the server's certificate ends in {apart}"
    return warning(sentence) if left_s < _CERTIFICATE_S else ok(sentence)


CHECKS = (
    Check(
        code="server",
        group=CheckGroup.SERVER,
        title="Which server",
        symptoms=(
            "ServerNotConfigured: remote=True needs a server, and none is configured",
            "ServerNotConfigured: SERVERLESS_GPU_SERVER is set, and SERVERLESS_GPU_TOKEN is not",
        ),
        cause="Remote calls go where SERVERLESS_GPU_SERVER says, or server.json of the home, which `sgpu up` and "
        "`sgpu login` write; it holds the token, so only you may read it.",
        mend="sgpu up   (on this machine; or, for one that is there: sgpu login URL)",
        probe=_profile,
    ),
    Check(
        code="server-answers",
        group=CheckGroup.SERVER,
        title="Whether the server answers",
        symptoms=(
            "ServerUnavailable: the server at http://127.0.0.1:7878 does not answer (ConnectError: …)",
            "serverless-gpu: the server at … does not answer; waiting for it",
        ),
        cause="It was stopped, or a tunnel to it was; or it runs and its database or disk does not work.",
        mend="sgpu up",
        probe=_answers,
    ),
    Check(
        code="server-token",
        group=CheckGroup.SERVER,
        title="The token",
        symptoms=("NotAuthenticated: …",),
        cause="The token is not known there: it has expired, was revoked, or is another server's.",
        mend="sgpu login URL   (with a token that `sgpu token create`, or whoever runs the server, makes)",
        probe=_token,
    ),
    Check(
        code="server-protocol",
        group=CheckGroup.SERVER,
        title="Versions of server and client",
        symptoms=("ServerProblem: the answer of … cannot be understood: …",),
        cause="Server and client are versions of this package that do not speak the same protocol.",
        mend="pip install --upgrade serverless-gpu, on the older side",
        probe=_protocol,
    ),
    Check(
        code="server-nodes",
        group=CheckGroup.SERVER,
        title="The server's machines",
        symptoms=(
            "a remote run stays QUEUED: no node has joined",
            "NoSuitableNode: …; the run was not queued",
            "sgpu nodes shows SILENT or GONE",
            "sgpu nodes shows DRAINING: takes nothing new: unkillable: after run …: process … could not be ended",
            "sgpu nodes shows DRAINING: takes nothing new: … drains it since …",
            "sgpu nodes says that a node has a clock that is ahead of, or behind, the server's",
        ),
        cause="A node joins by itself and says every few seconds that it is there; one that does not is off, cut off, "
        "or its processes were ended. It measures how far its clock is from the server's, and says that, too. "
        "One on which a process cannot even be killed, for it waits for a disk that hangs, takes nothing new.",
        mend="restart `sgpu up` there; for a machine that is dead: sgpu node forget NAME --i-know-it-is-dead",
        probe=_nodes,
    ),
    Check(
        code="server-isolation",
        group=CheckGroup.SERVER,
        title="Whether users are kept apart",
        symptoms=(
            "a run stays QUEUED: pool 'default' runs the code of one principal only, because all runs there share one "
            "operating-system user; …",
        ),
        cause="All runs of a node have the operating-system user of its agent. The code of one can read files, "
        "variables and secrets of the others, and the server's key and tokens on its machine. So a pool runs the code "
        "of the server's first administrator only, until an administrator accepts that.",
        mend="sgpu pool set NAME --isolation none   (--isolation unset takes it back; then: sgpu server rotate)",
        probe=_isolation,
    ),
    Check(
        code="server-clock",
        group=CheckGroup.SERVER,
        title="Clocks of server and client",
        symptoms=("`sgpu runs` shows moments that lie ahead, or negative times",),
        cause="The machines do not agree what time it is. Limits and leases do not depend on it; what is shown, and "
        "when tokens expire, does.",
        mend="timedatectl set-ntp true, on the machine that is wrong",
        probe=_clock,
    ),
    Check(
        code="server-tls",
        group=CheckGroup.SERVER,
        title="The server's certificate",
        symptoms=("ServerUnavailable: … CERTIFICATE_VERIFY_FAILED …",),
        cause="The certificate has ended, is for another name, or is of an authority that this machine does not know.",
        mend="renew its files and tell the server: systemctl reload serverless-gpu   (an authority of your own: "
        "sgpu login URL --ca FILE)",
        probe=_certificate,
    ),
)


@about(lambda facts: facts.pool)
def _pool_token(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.directory:
        return []
    if pool.token_problem:
        return failed(f"Ray's token, {pool.directory}/token: {pool.token_problem}", f"chmod 600 {pool.directory}/token")
    if not pool.processes:
        return unknown("Ray is being started, or its processes cannot be seen")
    if pool.without_token:
        sentence = f"Ray lets in everybody who reaches it: without a token run {', '.join(pool.without_token)}"
        return failed(sentence, "sgpu stop   (and start `sgpu up` or `sgpu join` again)")
    return ok("Ray asks everybody for the pool's token")


@about(lambda facts: facts.pool)
def _pool_version(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.version:
        return []
    if release(pool.version) < OLDEST:
        return failed(
            f"Ray {pool.version} runs, which is too old for a pool", "pip install --upgrade ray   (everywhere)"
        )
    return ok(f"Ray {pool.version}, {pool.processes} processes")


@about(lambda facts: facts.pool)
def _pool_listeners(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.listeners:
        return []
    everywhere = [each for each in pool.listeners if each.address == "*"]
    ports = ", ".join(f"{each.port} {each.process}" for each in everywhere)
    beyond = [address for address in pool.addresses if address != pool.address]
    if everywhere and beyond:
        sentence = f"Ray listens on all addresses, on {', '.join(beyond)} too: {ports}"
        return warning(sentence, "a firewall that lets the pool's machines through, and nobody else")
    return ok(f"Ray listens for {pool.address}: {ports}" if everywhere else f"Ray listens on {pool.address} alone")


@about(lambda facts: facts.pool)
def _pool_fence(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.directory:
        return []
    if pool.unfenced:
        sentence = f"`ray stop` in a rank would end Ray here: {pool.unfenced}"
        return warning(sentence, 'env="snapshot", or Linux 6.12; Ray is started again within seconds, and runs go on')
    return ok("ranks can signal nothing but what they have started: `ray stop` finds Ray and cannot end it")


POOL_CHECKS = (
    Check(
        code="pool-token",
        group=CheckGroup.SERVER,
        title="Who gets into the pool's Ray",
        symptoms=("sgpu doctor says that Ray lets in everybody who reaches it",),
        cause="A Ray without a token runs code for whoever reaches its ports. `sgpu up --engine ray` and `sgpu join` "
        "start every process with one, from a file that only their user may read.",
        mend="chmod 600 on the file that is named; start `sgpu up` or `sgpu join` again",
        probe=_pool_token,
    ),
    Check(
        code="pool-version",
        group=CheckGroup.SERVER,
        title="The pool's Ray",
        symptoms=(
            "sgpu join: this machine has Ray …, and the pool has …",
            "sgpu join: Ray is not installed for …",
        ),
        cause="All machines of a pool need the same version of Ray, and the same minor version of Python.",
        mend="pip install 'ray==VERSION', the one that `sgpu join` names",
        probe=_pool_version,
    ),
    Check(
        code="pool-ports",
        group=CheckGroup.SERVER,
        title="Where the pool's Ray listens",
        symptoms=(
            "sgpu join: the server answers, and Ray at … does not: …",
            "sgpu join: port … is taken on this machine, and Ray needs …",
        ),
        cause="Ray uses a hundred ports in a row on each machine and listens on all addresses. They have to be open "
        "between the machines of the pool, in both directions, and closed to everybody else. So have those that the "
        "kernel gives: there the machines of a gang meet, and NCCL and Gloo listen.",
        mend="a firewall; `sgpu up --ray-port PORT`, or `sgpu join … --ray-port PORT`, for another hundred",
        probe=_pool_listeners,
    ),
    Check(
        code="pool-fence",
        group=CheckGroup.SERVER,
        title="Whether a rank can end the pool's Ray",
        symptoms=("sgpu join: Ray ended after …; it is started again",),
        cause="Ranks run as the user whose Ray it is, and `ray stop` ends every Ray it finds. From Linux 6.12 on ranks "
        'of root, and those with env="snapshot", signal nothing but what they have started.',
        mend='env="snapshot", or a newer kernel; runs go on either way',
        probe=_pool_fence,
    ),
)


@about(lambda facts: facts.tracking)
def _tracking(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
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
def _mlflow_servers(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
    found: list[Finding] = []
    for server in tracking.servers:
        if server.problem:
            found += warning(f"{server.uri}: {server.problem}", _mend_mlflow(server))
        elif server.stage == "ready" and server.away:
            found += warning(f"{server.uri} (pid {server.pid}) does not answer: {server.away}")
        else:
            version = f", MLflow {server.version}" if server.version else ""
            found += ok(f"{server.uri} is {server.stage}{version}")
    return found


def _mend_mlflow(server: TrackingServer) -> str:
    """Return the command that helps a server that does not come up."""
    again = shlex.join(["sgpu", "mlflow", *([server.store] if server.store else [])])
    if NO_DATABASE in server.problem and server.file:
        return f"{shlex.join(['mv', server.file, f'{server.file}.away'])} && {again}   (a new one is made)"
    if OTHER_VERSION in server.problem:
        python = server.python or "python"
        return f"{shlex.join([python, '-m', 'mlflow', 'db', 'upgrade', server.database])} && {again}   (after a backup)"
    return again


TRACKING_CHECKS = (
    Check(
        code="tracking",
        group=CheckGroup.TRACKING,
        title="Where runs are tracked",
        symptoms=("MLflow at http://… does not answer: …",),
        cause="MLFLOW_TRACKING_URI names a server that is away. Runs go on without it; what was to be written is kept, "
        "and written when it comes back.",
        mend="start that server, or unset MLFLOW_TRACKING_URI",
        probe=_tracking,
    ),
    Check(
        code="mlflow-server",
        group=CheckGroup.TRACKING,
        title="MLflow's server in front of this home's runs",
        symptoms=(
            "… is not a database; once that file is moved away a new one is made",
            "… was written by another version of MLflow; serve it with that one, or upgrade it, after a backup: …",
            "… has only a part of MLflow (no flask; mlflow-skinny is not enough); pip install mlflow",
            "MLflow's server ended (exit code 1): …",
        ),
        cause="The server is the MLflow of the environment that runs were tracked from: a part of it lacks, its "
        "database is another version's or none, or it was ended. It is tried again by itself, less and less often.",
        mend="sgpu doctor   (names the command; then `sgpu mlflow` tries again at once)",
        probe=_mlflow_servers,
    ),
)
