"""Probes the machine: home directory, run directories, limits, network, mounts, and agent.

Most probes change nothing on the machine. The mount probe mounts an environment in a process with a separate namespace.
If no agent runs, the agent probe creates a cgroup and removes it again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from serverless_gpu.ambient import SystemClock
from serverless_gpu.client.agent import agent_status
from serverless_gpu.doctor.facts import (
    AgentFacts,
    CgroupFacts,
    Disk,
    HomeFacts,
    IsolationFacts,
    KernelFacts,
    LimitFacts,
    MountFacts,
    NetworkFacts,
    PrincipalFacts,
    RunsFacts,
    UnknownFact,
)
from serverless_gpu.doctor.probes.bounded_calls import look, side_by_side
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.model.calendars import DAY_NS
from serverless_gpu.model.lifecycle.retention import Policy
from serverless_gpu.node.attempt.history import read_run, run_ids, size_on_disk
from serverless_gpu.node.base.configuration import read_configuration
from serverless_gpu.node.base.home import find_home, storage_error
from serverless_gpu.node.base.lock_files import held_note
from serverless_gpu.node.base.network import NoPort, reserve_port
from serverless_gpu.node.base.protocol import agent_socket
from serverless_gpu.node.base.requirements import flock_refusal, is_noexec, pidfd_refusal, record_lock_refusal
from serverless_gpu.node.inside import namespaces
from serverless_gpu.node.processes.process_tree import controllers, find_cgroup_root
from serverless_gpu.node.processes.spawn import clean_process, one_name
from serverless_gpu.node.spawner.client import find_spawner
from serverless_gpu.version import __version__

_PROBE_BYTES = 1 << 16
_LOOPBACK_S = 1.0
_RESOLVE_S = 2.0
_ANSWER_S = 3.0
_PID_BYTES = 20
_FINE = b"fine"


def look_at_home(environ: Mapping[str, str]) -> HomeFacts:
    """Return the facts about the home directory."""
    try:
        home = find_home(environ)
    except StorageError as error:
        return HomeFacts(
            problem=error.message, hint=error.hint, temporary_problem=_temporary_problem(), disks=_disks(("/tmp",))
        )
    problem = _write_problem(home.root)
    sockets, sockets_problem = "", ""
    try:
        sockets = str(home.sockets())
    except (StorageError, OSError) as error:
        sockets_problem = str(getattr(error, "message", error))
    configuration_problem = ""
    try:
        read_configuration(home)
    except ServerlessGpuError as error:
        configuration_problem = str(error)
    flock, records = ("", "") if problem else (flock_refusal(home.root), record_lock_refusal(home.root))
    return HomeFacts(
        root=str(home.root),
        problem=problem.message if problem else "",
        hint=problem.hint if problem else "",
        note=home.note,
        filesystem=filesystem_of(os.path.realpath(home.root), _text("/proc/self/mountinfo")),
        is_noexec=is_noexec(home.root),
        flock_refusal=flock,
        record_lock_refusal=records,
        configuration_problem=configuration_problem,
        temporary_problem=_temporary_problem(),
        sockets=sockets,
        sockets_problem=sockets_problem,
        disks=_disks((str(home.root), "/tmp")),
    )


def look_at_runs(environ: Mapping[str, str]) -> RunsFacts:
    """Return the number and size of the run directories, and the facts about the latest run."""
    home = find_home(environ)
    try:
        policy = read_configuration(home).retention
    except ServerlessGpuError:
        policy = Policy()  # The configuration check reports an invalid configuration file.
    ids = run_ids(home.runs)
    receipts = (read_run(home.runs, run_id).receipt for run_id in ids)
    last = next((receipt for receipt in receipts if receipt is not None), None)
    return RunsFacts(
        count=len(ids),
        size_bytes=sum(size_on_disk(home.runs / run_id) for run_id in ids),
        days=None if policy.age_ns is None else policy.age_ns / DAY_NS,
        size_bytes_max=policy.size_bytes_max,
        last_run=last.run_id if last else "",
        warm=last.warm if last else False,
        warm_reason=last.warm_reason if last else "",
    )


def look_at_kernel() -> KernelFacts:
    """Return the kernel release and the kernel's support for pidfds, which every run needs."""
    refusal, hint = pidfd_refusal()
    return KernelFacts(release=os.uname().release, pidfd_refusal=refusal, hint=hint)


def look_at_isolation(environ: Mapping[str, str]) -> IsolationFacts:
    """Measure the isolation level that an agent of this user offers on this machine."""
    found = find_spawner(environ).measure()
    return IsolationFacts(level=found.level, problem=found.problem)


def look_at_limits() -> LimitFacts:
    """Return the resource limits that ranks inherit."""
    soft, hard = (_limit(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    disks = _disks(("/dev/shm",))
    return LimitFacts(
        descriptors=soft,
        descriptors_hard=hard,
        processes=_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        address_space_bytes=_limit(resource.getrlimit(resource.RLIMIT_AS)[0]),
        shared_memory=disks[0] if disks else None,
    )


def look_at_network() -> NetworkFacts:
    """Return the network facts that decide if ranks on this machine can connect to each other."""
    hostname = socket.gethostname()
    resolved = side_by_side({"name": lambda: socket.getaddrinfo(hostname, None)}, _RESOLVE_S)["name"]
    port_problem = ""
    try:
        reserve_port().close()
    except NoPort as error:
        port_problem = str(error)
    return NetworkFacts(
        loopback_problem=_loopback_problem(),
        port_problem=port_problem,
        ports=count_ports(_text("/proc/sys/net/ipv4/ip_local_port_range")),
        sockets_used=count_sockets(_text("/proc/net/sockstat")),
        hostname=hostname,
        hostname_problem=resolved.why if isinstance(resolved, UnknownFact) else "",
    )


def look_at_agent(environ: Mapping[str, str]) -> tuple[AgentFacts, CgroupFacts | UnknownFact]:
    """Return the agent's status, and the cgroups that a running or future agent uses.

    Raises:
        StorageError: the home directory or its socket directory is unusable.
    """
    home = find_home(environ)
    sockets = home.sockets()
    others = _others(sockets)
    answer = side_by_side({"agent": lambda: agent_status(home.root)}, _ANSWER_S)["agent"]
    if isinstance(answer, UnknownFact):
        pid = _holder(agent_socket(sockets).with_suffix(".lock")) or "unknown"
        agent = AgentFacts(
            problem=f"the agent (pid {pid}) does not answer: {answer.why}",
            hint=f"kill -9 {pid}   (running attempts continue; the next call starts another agent)",
            others=others,
        )
        return agent, UnknownFact("the agent does not answer")
    if answer is None:
        return AgentFacts(others=others), _cgroups_from_here(environ)
    agent = AgentFacts(
        pid=answer.pid,
        version=__version__,
        python=one_name(sys.executable),
        zygotes=answer.zygotes,
        attempts=len(answer.attempts),
        queued=len(answer.queued),
        others=others,
    )
    path = Path(answer.cgroups) if answer.cgroups else None
    return agent, CgroupFacts(path=answer.cgroups, problem=answer.cgroups_problem, controllers=controllers(path))


def look_at_principals(environ: Mapping[str, str]) -> PrincipalFacts | UnknownFact:
    """Return the number of this node's principals, and the findings of its sweeper."""
    try:
        count, findings = find_spawner(environ).findings()
    except (OSError, msgspec.MsgspecError, ServerlessGpuError) as error:
        return UnknownFact(f"the principals of this node cannot be read: {error}")
    since_ns = SystemClock().wall_ns() - findings.swept_ns
    return PrincipalFacts(
        count=count, swept_s=since_ns / 1e9 if findings.swept_ns else None, findings=findings.sentences()
    )


def look_at_mounts(environ: Mapping[str, str], limit_s: float) -> MountFacts | UnknownFact:
    """Try to mount an environment from the home directory as the current user."""
    home = find_home(environ)
    ended = look(
        lambda fd, log: clean_process(__name__, (fd, str(home.root)), fds=(fd,), log=log, environ=environ), limit_s
    )
    if ended.answer == _FINE:
        return MountFacts()
    if not ended.answer:
        return UnknownFact(f"{ended.why}. {ended.written.strip()[-300:]}")
    return MountFacts(problem=ended.answer.decode("utf-8", "replace"), is_root=os.geteuid() == 0)


def main(fd: int, home: str) -> None:
    """Try to mount an environment, and write the error of a failed mount to a file descriptor."""
    os.write(fd, namespaces.probe_mounts(home).encode() or _FINE)


def filesystem_of(path: str, mounts: str) -> str:
    """Return the file system type of a resolved absolute path, or "" for an unknown file system.

    `mounts` is the text of `/proc/self/mountinfo`.
    """
    best, kind = "", ""
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        parts = fields.split()
        if len(parts) < 5 or not rest:
            continue
        point = parts[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # Of two mounts at one mount point, the later mount is visible.
            best, kind = point, rest.split()[0]
    return kind


def _write_problem(root: Path) -> StorageError | None:
    """Return the error of a test write, or None. Only a real write reveals an exceeded quota."""
    try:
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-") as file:
            file.write(b"\0" * _PROBE_BYTES)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return storage_error(error, root)
    return None


def _temporary_problem() -> str:
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        return error.strerror or str(error)
    return ""


def _disks(places: tuple[str, ...]) -> tuple[Disk, ...]:
    disks: dict[int, Disk] = {}
    for place in places:
        with contextlib.suppress(OSError):
            status = os.statvfs(place)
            total, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
            disk = Disk(place, total, free, status.f_files, status.f_favail)
            disks.setdefault(os.stat(place).st_dev, disk)
    return tuple(disks.values())


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _loopback_problem() -> str:
    try:
        with socket.socket() as listening, socket.socket() as calling:
            listening.settimeout(_LOOPBACK_S)
            calling.settimeout(_LOOPBACK_S)
            listening.bind(("127.0.0.1", 0))
            listening.listen(1)
            calling.connect(listening.getsockname())
            listening.accept()[0].close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def count_ports(text: str) -> int:
    """Return the size of the kernel's port range, parsed from a line such as ``32768 60999``."""
    numbers = text.split()
    return int(numbers[1]) - int(numbers[0]) + 1 if len(numbers) == 2 else 0


def count_sockets(text: str) -> int:
    """Count TCP sockets in use or in TIME_WAIT, given lines such as ``TCP: inuse 5 tw 2``."""
    for line in text.splitlines():
        name, *words = line.split()
        if name == "TCP:":
            counts = dict(zip(words[::2], words[1::2], strict=False))
            return int(counts.get("inuse", 0)) + int(counts.get("tw", 0))
    return 0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cgroups_from_here(environ: Mapping[str, str]) -> CgroupFacts:
    root = find_cgroup_root(f"serverless_gpu-doctor-{os.getpid()}", environ)
    try:
        path = "" if root.path is None else str(root.path)
        return CgroupFacts(path=path, problem=root.problem, controllers=controllers(root.path))
    finally:
        root.close()


def _others(sockets: Path) -> dict[str, str]:
    """Find agents of other versions in this home directory by the locks that running agents hold."""
    found: dict[str, str] = {}
    for path in sorted(sockets.glob("agent-*.lock")):
        pid = _holder(path)
        if path.name != agent_socket(sockets).with_suffix(".lock").name and pid:
            number, _, version = path.name.removeprefix("agent-").removesuffix(".lock").partition("-")
            found[pid] = f"{version}, protocol {number}"
    return found


def _holder(path: Path) -> str:
    """Return the pid of the agent that holds a lock, or "" for a free lock."""
    return (held_note(path) or b"")[:_PID_BYTES].decode("ascii", "replace").strip()
