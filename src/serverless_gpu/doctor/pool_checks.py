"""Checks of the pool that this machine is in by Ray; a machine that is in none has nothing said about it (P-33)."""

from __future__ import annotations

from serverless_gpu.doctor.facts import MachineFacts, PoolFacts
from serverless_gpu.doctor.findings import Check, CheckGroup, Finding, about, failed, ok, unknown, warning
from serverless_gpu.engines.ray.start_arguments import OLDEST
from serverless_gpu.node.inside.raycluster.ray_installation import release


@about(lambda facts: facts.pool)
def _token(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
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
def _version(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.version:
        return []
    if release(pool.version) < OLDEST:
        return failed(
            f"Ray {pool.version} runs, which is too old for a pool", "pip install --upgrade ray   (everywhere)"
        )
    return ok(f"Ray {pool.version}, {pool.processes} processes")


@about(lambda facts: facts.pool)
def _listeners(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
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
def _fence(facts: MachineFacts, pool: PoolFacts) -> list[Finding]:
    if not pool.directory:
        return []
    if pool.unfenced:
        sentence = f"`ray stop` in a rank would end Ray here: {pool.unfenced}"
        return warning(sentence, 'env="snapshot", or Linux 6.12; Ray is started again within seconds, and runs go on')
    return ok("ranks can signal nothing but what they have started: `ray stop` finds Ray and cannot end it")


CHECKS = (
    Check(
        code="pool-token",
        group=CheckGroup.SERVER,
        title="Who gets into the pool's Ray",
        symptoms=("sgpu doctor says that Ray lets in everybody who reaches it",),
        cause="A Ray without a token runs code for whoever reaches its ports. `sgpu up --engine ray` and `sgpu join` "
        "start every process with one, from a file that only their user may read.",
        mend="chmod 600 on the file that is named; start `sgpu up` or `sgpu join` again",
        probe=_token,
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
        probe=_version,
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
        probe=_listeners,
    ),
    Check(
        code="pool-fence",
        group=CheckGroup.SERVER,
        title="Whether a rank can end the pool's Ray",
        symptoms=("sgpu join: Ray ended after …; it is started again",),
        cause="Ranks run as the user whose Ray it is, and `ray stop` ends every Ray it finds. From Linux 6.12 on ranks "
        'of root, and those with env="snapshot", signal nothing but what they have started.',
        mend='env="snapshot", or a newer kernel; runs go on either way',
        probe=_fence,
    ),
)
