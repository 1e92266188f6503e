"""Checks the server for remote calls, the Ray cluster of a pool, and MLflow servers.

If no server is configured, the report contains a single line about servers. On a machine outside all pools, the pool
checks return no findings (P-33). The tracking checks report only warnings, because tracking problems never prevent a
run. If an early check finds an unreachable server, the later checks return no findings. An unreachable server therefore
causes one failure instead of six.
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
from serverless_gpu.model.isolation import LEVELS, NONE, reaches
from serverless_gpu.model.scheduling.wait_messages import REVOKE, SANDBOX_REMEDY
from serverless_gpu.node.inside.raycluster.ray_installation import release
from serverless_gpu.node.mlflow_server.server import NO_DATABASE, OTHER_VERSION
from serverless_gpu.units import format_days_ms
from serverless_gpu.version import __version__

_PENDING = "PENDING"  # State of a node that waits for an administrator's approval.
_CLOCK_S = 5
_CLOCK_FAILS_S = 60
_SILENT_S = 60.0
_CERTIFICATE_S = 21 * 86_400
_KEY_DAYS_MAX = 365


@about(lambda facts: facts.server)
def _profile(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if server.problem:
        return failed(server.problem, server.hint)
    if not server.url:
        return ok("no server for remote=True is configured (start a server with `sgpu up`, or run `sgpu login URL`)")
    if not server.is_private:
        sentence = f"other users can read the token in {server.profile}"
        return failed(sentence, f"chmod 600 {server.profile}   (then replace the token: sgpu token create, sgpu login)")
    return ok(f"{server.url}, by {server.profile or 'SERVERLESS_GPU_SERVER'}")


@about(lambda facts: facts.server)
def _answers(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if server.away:
        mend = (
            "sgpu up"
            if server.embedded
            else (f"check that the server runs and is reachable: curl {server.url}/api/v1/health")
        )
        return failed(server.away, f"{mend}   (running attempts continue for 15 minutes)")
    if not server.version:
        return []
    if server.unwell:
        return failed("; ".join(server.unwell), "sgpu server logs --level warning   (on the server's machine)")
    return ok(f"the server runs serverless-gpu {server.version} and reports no problems")


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
        sentence = f"the server uses protocol {server.protocol}, but this package uses protocol {server.own_protocol}"
        older = "the server" if server.protocol < server.own_protocol else "this package"
        return failed(sentence, f"upgrade {older}: pip install --upgrade serverless-gpu")
    if server.own_protocol != server.protocol:
        text = f"the server uses protocol {server.protocol}, but still accepts protocol {server.own_protocol}"
        return ok(f"{text}: upgrade this package soon")
    if server.version != __version__:
        return ok(
            f"server version {server.version} and client version {__version__} both use protocol {server.protocol}"
        )
    return ok(f"protocol {server.protocol}")


@about(lambda facts: facts.server)
def _nodes(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.principal:
        return []
    if server.nodes is None:
        return unknown("your role may not list nodes")
    if not server.nodes:
        return (
            failed("no node has joined the server, so no run can start")
            if server.embedded
            else warning("no node has joined the server")
        )
    found = []
    for node in server.nodes:
        is_silent = node.state != "UP" or (node.silent_s is not None and node.silent_s > _SILENT_S)
        if is_silent or node.sentence:
            mend = f"sgpu node resume {node.name}   (after the maintenance of the node)" if node.drained else ""
            words = node.sentence or f"silent for {node.silent_s:.0f} s"
            found += warning(f"{node.name} is {node.state}: {words}", mend)
        if node.clock:
            mend = (
                "run `timedatectl set-ntp true` on the node   (limits, leases and charges do not depend on the "
                "node's clock)"
            )
            found += warning(f"{node.name} {node.clock}: runs on this node record wrong times", mend)
    return found or ok(", ".join(f"{node.name} is up" for node in server.nodes))


@about(lambda facts: facts.server)
def _node_keys(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.principal or not server.nodes:
        return []
    found = []
    for node in server.nodes:
        if not node.has_key and node.state not in ("PENDING", "REVOKED"):
            found += warning(
                f"{node.name} has no key: a copy of its token is enough to act as {node.name}",
                "upgrade serverless-gpu on the node   (the node makes a key at its next start)",
            )
        if node.key_days is not None and node.key_days > _KEY_DAYS_MAX:
            found += warning(f"the key of {node.name} is {node.key_days} days old", f"sgpu node rotate {node.name}")
    return found or ok("the server knows the key of each node")


@about(lambda facts: facts.server)
def _isolation(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.principal:
        return []
    if server.closed_pools is None:
        return unknown("your role may not list pools")
    if server.principals is not None and server.principals < 2:
        return ok("only one principal starts runs on this server")
    found = []
    if server.shared_pools:
        sentence = f"several principals share one operating-system user in {', '.join(server.shared_pools)}"
        mend = REVOKE.format(pool=server.shared_pools[0])
        found += failed(
            (f"{sentence}: each run can read the files of all other runs"), f"{mend}   (running attempts continue)"
        )
    if server.closed_pools:
        sentence = f"only the first administrator's runs start in {', '.join(server.closed_pools)}"
        mend = SANDBOX_REMEDY.format(pool=server.closed_pools[0])
        found += warning(f"{sentence}: runs of other principals wait", f"{mend}   (agents must run as root)")
    for node in server.nodes or ():
        if node.unfiltered:
            sentence = f"{node.name} has no network rules: runs reach the server and each service of the node"
            found += warning(f"{sentence} ({node.unfiltered})", "install nftables on the node, and restart its uplink")
    return found or ok("no pool lets principals share an operating-system user")


@about(lambda facts: facts.server)
def _node_levels(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    """Compare the measured level of each node with the level of its pool."""
    if not server.nodes:
        return []
    found: list[Finding] = []
    for node in server.nodes:
        wanted = server.levels.get(node.pool, "")
        problem = f": {node.isolation_problem}" if node.isolation_problem else ""
        if node.state == _PENDING:
            continue
        if not wanted:
            found += unknown(f"{node.name} offers {node.isolation}, and your role may not see its pool")
        elif reaches(node.isolation, wanted):
            found += ok(f"{node.name} offers {node.isolation}, pool {node.pool} needs {_needed(wanted)}")
        else:
            sentence = f"{node.name} offers {node.isolation}, but pool {node.pool} needs {wanted}{problem}"
            mend = f"sgpu pool set OTHER --node {shlex.quote(node.name)}   (or remove the reason and restart the node)"
            found += warning(sentence, mend)
    return found


def _needed(isolation: str) -> str:
    return isolation if isolation in LEVELS else f"{NONE} (isolation {isolation})"


@about(lambda facts: facts.server)
def _clock(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    if not server.version:
        return []
    if server.clock_ahead_s is None:
        return unknown("the server did not send its time")
    apart = abs(server.clock_ahead_s)
    sentence = (
        f"the server's clock is {apart} s {'ahead of' if server.clock_ahead_s > 0 else 'behind'} this machine's clock"
    )
    if apart >= _CLOCK_FAILS_S:
        return failed(sentence)
    return (
        warning(sentence)
        if apart >= _CLOCK_S
        else ok("the clocks of the server and this machine differ by at most a few seconds")
    )


@about(lambda facts: facts.server)
def _certificate(facts: MachineFacts, server: ServerFacts) -> list[Finding]:
    left_s = server.certificate_left_s
    if left_s is None:
        if not server.version:
            return []
        is_seen = not server.url.startswith("https://")
        return (
            ok("plain HTTP on this machine needs no certificate")
            if is_seen
            else unknown("the doctor could not read the server's certificate")
        )
    apart = format_days_ms(round(abs(left_s) * 1000))
    if left_s <= 0:
        return failed(f"the server's certificate expired {apart} ago")
    sentence = f"the server's certificate expires in {apart}"
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
        cause="SERVERLESS_GPU_SERVER, or server.json in the home directory, names the server for remote calls. `sgpu "
        "up` and `sgpu login` write server.json. The file contains your token, so no other user may have read access.",
        mend="sgpu up   (to use an existing server instead, run `sgpu login URL`)",
        probe=_profile,
    ),
    Check(
        code="server-answers",
        group=CheckGroup.SERVER,
        title="A server that does not answer",
        symptoms=(
            "ServerUnavailable: the server at http://127.0.0.1:7878 does not answer (ConnectError: …)",
            "serverless-gpu: the server at … does not answer; waiting for it",
        ),
        cause="The server or a tunnel to the server has stopped, or the server cannot use its database or disk.",
        mend="sgpu up",
        probe=_answers,
    ),
    Check(
        code="server-token",
        group=CheckGroup.SERVER,
        title="The token",
        symptoms=("NotAuthenticated: …",),
        cause="The server rejects the token. The token has expired, was revoked, or belongs to another server.",
        mend="sgpu login URL   (with a token from `sgpu token create` or the server's administrator)",
        probe=_token,
    ),
    Check(
        code="server-protocol",
        group=CheckGroup.SERVER,
        title="Versions of server and client",
        symptoms=("ServerProblem: the answer of … cannot be understood: …",),
        cause="The package versions of server and client have no protocol in common.",
        mend="run `pip install --upgrade serverless-gpu` on the machine with the older version",
        probe=_protocol,
    ),
    Check(
        code="server-nodes",
        group=CheckGroup.SERVER,
        title="The server's nodes",
        symptoms=(
            "a remote run stays QUEUED: no node has joined",
            "NoSuitableNode: …; the run was not queued",
            "sgpu node list shows SILENT or GONE",
            "sgpu node list shows DRAINING: starts no new runs: unkillable: after run …: process … could not be ended",
            "sgpu node list shows DRAINING: starts no new runs: … drains it since …",
            "sgpu node list shows a node whose clock is ahead of or behind the server's",
        ),
        cause="A node joins the server automatically and sends heartbeats every few seconds. Heartbeats stop if the "
        "machine is off or disconnected, or if its agent has ended. Each node measures the offset between its clock "
        "and the server's clock. A node accepts no new runs while a process survives SIGKILL, for example because of "
        "a hung disk.",
        mend="restart `sgpu up` on the node, or remove a dead machine: sgpu node forget NAME --i-know-it-is-dead",
        probe=_nodes,
    ),
    Check(
        code="server-node-keys",
        group=CheckGroup.SERVER,
        title="Keys of the nodes",
        symptoms=(
            "NotAuthenticated: the token … belongs to a node with a key, and is not valid without the key",
            "uplink.log: NotAllowed: the token of … belongs to a node with another key, not …",
            "uplink.log: NotAllowed: the node … waits for an administrator to approve it",
            "InvalidValue: the node's key … is not private: the file's mode is …, so others can read it",
        ),
        cause="A node proves its identity with the private key in the file node.key of its home directory. The "
        "server binds the key, the name and the machine of a node. A node of an earlier version has no key. Another "
        "key or another machine under the same name needs the approval of an administrator.",
        mend="sgpu node approve NAME   (after a loss of node.key, join the machine again: sgpu node invite NAME)",
        probe=_node_keys,
    ),
    Check(
        code="server-isolation",
        group=CheckGroup.SERVER,
        title="Isolation of users",
        symptoms=(
            "a run stays QUEUED: pool 'default' runs the code of one principal only, because all runs there share one "
            "operating-system user; …",
        ),
        cause="All runs on a node share the operating-system user of the node's agent. One principal's code could "
        "therefore read other principals' files, variables and secrets. On the server's machine, the code could also "
        "read the server's key and tokens. Therefore a pool runs only the first administrator's code until an "
        "administrator accepts the risk.",
        mend="sgpu pool set NAME --isolation sandbox, or none to share the user   (to revert the setting, use "
        "--isolation unset, then run `sgpu server rotate`)",
        probe=_isolation,
    ),
    Check(
        code="node-isolation",
        group=CheckGroup.SERVER,
        title="Isolation levels of nodes",
        symptoms=("a run stays QUEUED: … offers no isolation sandbox: …",),
        cause="Runs of a pool start only on nodes that offer the isolation level of the pool. A node measures its "
        "level when its uplink starts.",
        mend="remove the reason that the check names, and restart the node; or move the node to another pool",
        probe=_node_levels,
    ),
    Check(
        code="server-clock",
        group=CheckGroup.SERVER,
        title="Clocks of server and client",
        symptoms=("`sgpu runs` shows future times or negative durations",),
        cause="The clocks of the server and the client differ. Limits and leases do not depend on other machines' "
        "clocks. Displayed times and token expiry depend on both clocks.",
        mend="run `timedatectl set-ntp true` on the machine whose clock is wrong",
        probe=_clock,
    ),
    Check(
        code="server-tls",
        group=CheckGroup.SERVER,
        title="The server's certificate",
        symptoms=("ServerUnavailable: … CERTIFICATE_VERIFY_FAILED …",),
        cause="The certificate has expired, names another host, or comes from an authority that this machine does "
        "not trust.",
        mend="renew the certificate files and run `systemctl reload serverless-gpu`   (to trust a private authority, "
        "run `sgpu login URL --ca FILE`)",
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
        return unknown("Ray is still starting, or another user owns Ray's processes")
    if pool.without_token:
        sentence = f"any host can run code on Ray processes without a token: {', '.join(pool.without_token)}"
        return failed(sentence, "sgpu stop   (then start `sgpu up` or `sgpu join` again)")
    return ok("every Ray process requires the pool's token")


@about(lambda facts: facts.pool)
def _pool_version(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.version:
        return []
    if release(pool.version) < OLDEST:
        return failed(
            (f"the running Ray {pool.version} is too old for a pool"),
            "pip install --upgrade ray   (on every machine of the pool)",
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
        sentence = f"Ray listens on all addresses, including {', '.join(beyond)}: {ports}"
        return warning(sentence, "use a firewall that admits only the pool's machines")
    return ok(f"Ray listens for {pool.address}: {ports}" if everywhere else f"Ray listens only on {pool.address}")


@about(lambda facts: facts.pool)
def _pool_fence(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.directory:
        return []
    if pool.unfenced:
        sentence = f"a rank that calls `ray stop` would end this machine's Ray: {pool.unfenced}"
        return warning(sentence, 'use env="snapshot" or Linux 6.12   (runs continue while the keeper restarts Ray)')
    return ok("`ray stop` in a rank cannot end this machine's Ray, because ranks cannot signal Ray's processes")


POOL_CHECKS = (
    Check(
        code="pool-token",
        group=CheckGroup.SERVER,
        title="Access to the pool's Ray",
        symptoms=("sgpu doctor reports that any host can run code on Ray processes without a token",),
        cause="A Ray process without a token executes code from any host that reaches Ray's ports. `sgpu up --engine "
        "ray` and `sgpu join` start every Ray process with a token from a private file.",
        mend="run `chmod 600` on the token file, then start `sgpu up` or `sgpu join` again",
        probe=_pool_token,
    ),
    Check(
        code="pool-version",
        group=CheckGroup.SERVER,
        title="Ray versions in the pool",
        symptoms=(
            "sgpu join: this machine has Ray …, but the pool has …",
            "sgpu join: Ray is not installed for …",
        ),
        cause="All machines of a pool need the same version of Ray and the same minor version of Python.",
        mend="pip install 'ray==VERSION'   (`sgpu join` prints the required version)",
        probe=_pool_version,
    ),
    Check(
        code="pool-ports",
        group=CheckGroup.SERVER,
        title="Ports of the pool's Ray",
        symptoms=(
            "sgpu join: the server answers, but Ray at … does not: …",
            "sgpu join: port … is in use on this machine, and Ray needs …",
        ),
        cause="Ray uses a hundred consecutive ports on each machine and listens on all addresses. The firewall must "
        "open Ray's ports between the pool's machines in both directions, and close the ports to all other hosts. "
        "The kernel's ephemeral ports, which rendezvous, NCCL and Gloo use, need the same firewall rules.",
        mend="open the ports in the firewall, or select another port range with `sgpu up --ray-port PORT` and `sgpu "
        "join … --ray-port PORT`",
        probe=_pool_listeners,
    ),
    Check(
        code="pool-fence",
        group=CheckGroup.SERVER,
        title="Protection of the pool's Ray from ranks",
        symptoms=("sgpu join: Ray exited after …; the keeper restarts Ray",),
        cause="Because ranks run as the same user as Ray, `ray stop` in a rank ends every Ray process on the machine. "
        'On Linux 6.12 or newer, ranks of root and ranks with env="snapshot" can signal only processes that they '
        "started.",
        mend='use env="snapshot" or a newer kernel   (runs continue even if Ray ends)',
        probe=_pool_fence,
    ),
)


@about(lambda facts: facts.tracking)
def _tracking(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
    if tracking.off:
        return ok(f"off: {tracking.off}")
    if not tracking.installed:
        return ok(f"MLflow does not track runs, because MLflow is not installed for {facts.python}")
    if not tracking.uri:
        return ok(
            "MLflow tracks runs in the store of this home directory (to print the store's address, run `sgpu mlflow`)"
        )
    if tracking.away:
        sentence = f"{tracking.uri} (MLFLOW_TRACKING_URI) does not answer: {tracking.away}"
        return warning(
            sentence,
            (f"curl {tracking.uri}/health   (or unset MLFLOW_TRACKING_URI to use the store of the home directory)"),
        )
    return ok(f"{tracking.uri}, by MLFLOW_TRACKING_URI{'' if tracking.away is None else '; it answers'}")


@about(lambda facts: facts.tracking)
def _mlflow_servers(facts: MachineFacts, tracking: TrackingFacts) -> list[Finding]:
    found: list[Finding] = []
    for server in tracking.servers:
        if server.problem:
            found += warning(f"{server.uri}: {server.problem}", _mend_mlflow(server))
        elif server.stage == "ready" and server.away:
            found += warning(f"the MLflow server {server.uri} (pid {server.pid}) does not answer: {server.away}")
        else:
            version = f", MLflow {server.version}" if server.version else ""
            found += ok(f"{server.uri} is {server.stage}{version}")
    return found


def _mend_mlflow(server: TrackingServer) -> str:
    """Return the command that repairs an MLflow server that does not start."""
    again = shlex.join(["sgpu", "mlflow", *([server.store] if server.store else [])])
    if NO_DATABASE in server.problem and server.file:
        return f"{shlex.join(['mv', server.file, f'{server.file}.away'])} && {again}   (this creates a new database)"
    if OTHER_VERSION in server.problem:
        python = server.python or "python"
        return f"{shlex.join([python, '-m', 'mlflow', 'db', 'upgrade', server.database])} && {again}   (after a backup)"
    return again


TRACKING_CHECKS = (
    Check(
        code="tracking",
        group=CheckGroup.TRACKING,
        title="The tracking server",
        symptoms=("MLflow at http://… does not answer (…)",),
        cause="The MLflow server that MLFLOW_TRACKING_URI names does not answer. Runs continue without tracking. The "
        "node stores unsent tracking data and sends the data later.",
        mend="start the MLflow server, or unset MLFLOW_TRACKING_URI",
        probe=_tracking,
    ),
    Check(
        code="mlflow-server",
        group=CheckGroup.TRACKING,
        title="The MLflow server of the home directory",
        symptoms=(
            "… is not a database; move the file elsewhere, and the next start creates a new database",
            "… was written by another version of MLflow; serve the store with that version, or …",
            "… has only a part of MLflow (no flask; mlflow-skinny is not enough); pip install mlflow",
            "MLflow's server ended (exit code 1): …",
        ),
        cause="The MLflow server runs in the Python environment that tracked the runs. The server does not start if "
        "the installed MLflow is incomplete, or if the database is invalid or has another version. The keeper "
        "retries the start with exponential backoff.",
        mend="sgpu doctor   (run the suggested command, then restart the server with `sgpu mlflow`)",
        probe=_mlflow_servers,
    ),
)
