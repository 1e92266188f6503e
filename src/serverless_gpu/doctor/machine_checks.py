"""Checks the machine's home directory, disks, sockets, limits, ports and configuration, and the agent."""

from __future__ import annotations

from serverless_gpu.doctor.facts import (
    NO_HOME,
    AgentFacts,
    CgroupFacts,
    Check,
    CheckGroup,
    CheckOutcome,
    Finding,
    HomeFacts,
    IsolationFacts,
    KernelFacts,
    LimitFacts,
    MachineFacts,
    MountFacts,
    NetworkFacts,
    PrincipalFacts,
    RunsFacts,
    UnknownFact,
    about,
    failed,
    ok,
    unknown,
    warning,
)
from serverless_gpu.node.base.requirements import OLDEST
from serverless_gpu.units import format_bytes

GIB = 2**30
NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs", "fuse.sshfs"}
)
_FREE_LOW_BYTES = 5 * GIB
_FREE_NONE_BYTES = 200 * 2**20
_FILES_LOW = 50_000  # Approximate number of files in an environment with torch.
_FILES_NONE = 500
_FILES = (
    "delete files there (sgpu clean --older-than 7d; sgpu env gc)   (or set SERVERLESS_GPU_HOME to a directory on "
    "a disk with more inodes; `df -i` shows them)"
)
_SHARED_LOW_BYTES = GIB
_DESCRIPTORS_LOW = 1024
_PROCESSES_LOW = 4096
_PORTS_USED_PERCENT = 80
_NOEXEC = (
    "set SERVERLESS_GPU_HOME to a directory on a file system without noexec   (or: sudo mount -o remount,exec …; "
    "or enable mounts, see mounts)"
)
_AS_ROOT = (
    "docker run --cap-add SYS_ADMIN --security-opt apparmor=unconfined …   "
    "(Kubernetes: securityContext.capabilities.add: [SYS_ADMIN])"
)


@about(lambda facts: facts.home)
def _home(facts: MachineFacts, home: HomeFacts) -> list[Finding]:
    if home.problem:
        return failed(home.problem, home.hint)
    if home.note:
        return warning(home.note)
    return ok(f"{home.root}, writable")


def _home_filesystem(facts: MachineFacts) -> list[Finding]:
    home = facts.home
    if isinstance(home, UnknownFact) or not home.root:
        return unknown(NO_HOME)
    if not home.filesystem:
        return unknown(f"the type of the file system of {home.root} is not known")
    if home.is_noexec and isinstance(facts.mounts, MountFacts) and facts.mounts.problem:
        return failed(f'{home.root} is mounted noexec: env="snapshot" cannot load compiled modules from it', _NOEXEC)
    if home.filesystem in NETWORK_FILESYSTEMS:
        return warning(f"{home.root} is on {home.filesystem}, a network file system")
    return ok(home.filesystem)


def _locks(facts: MachineFacts) -> list[Finding]:
    home = facts.home
    if isinstance(home, UnknownFact) or not home.root:
        return unknown(NO_HOME)
    if home.flock_refusal:
        return failed(f"the file system of {home.root} refuses file locks: flock: {home.flock_refusal}")
    if home.record_lock_refusal:
        return warning(f"the file system of {home.root} refuses the locks of SQLite: fcntl: {home.record_lock_refusal}")
    return ok("granted")


@about(lambda facts: facts.home)
def _disk_space(facts: MachineFacts, home: HomeFacts) -> list[Finding]:
    if not home.disks:
        return unknown("statvfs failed for every file system")
    found = []
    for disk in home.disks:
        sentence = f"{disk.place} has {format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}"
        if disk.free_bytes < _FREE_NONE_BYTES:
            found += failed(sentence)
        elif disk.free_bytes < min(_FREE_LOW_BYTES, disk.total_bytes // 20):
            found += warning(sentence)
        if disk.files and disk.free_files < _FILES_LOW:
            few = f"{disk.place} has {disk.free_files} of {disk.files} inodes left; each new file needs an inode"
            found += failed(few, _FILES) if disk.free_files < _FILES_NONE else warning(few, _FILES)
    text = ", ".join(f"{format_bytes(disk.free_bytes)} in {disk.place}" for disk in home.disks)
    return found or ok(f"{text} free")


@about(lambda facts: facts.home)
def _temporary_files(facts: MachineFacts, home: HomeFacts) -> list[Finding]:
    return failed(home.temporary_problem) if home.temporary_problem else ok("temporary files can be created")


@about(lambda facts: facts.limits)
def _shared_memory(facts: MachineFacts, limits: LimitFacts) -> list[Finding]:
    if limits.shared_memory is None:
        return failed("/dev/shm does not exist")
    sentence = f"/dev/shm has {format_bytes(limits.shared_memory.free_bytes)} free"
    return warning(sentence) if limits.shared_memory.free_bytes < _SHARED_LOW_BYTES else ok(sentence)


@about(lambda facts: facts.home)
def _sockets(facts: MachineFacts, home: HomeFacts) -> list[Finding]:
    if home.sockets_problem:
        return failed(home.sockets_problem)
    return ok(home.sockets) if home.sockets else unknown(NO_HOME)


@about(lambda facts: facts.kernel)
def _kernel(facts: MachineFacts, kernel: KernelFacts) -> list[Finding]:
    if kernel.pidfd_refusal:
        return failed(f"no run can start: {kernel.pidfd_refusal}", kernel.hint)
    return ok(f"Linux {kernel.release}")


@about(lambda facts: facts.isolation)
def _isolation(facts: MachineFacts, isolation: IsolationFacts) -> list[Finding]:
    """Report the level without a warning, because local runs and servers with one user need no isolation."""
    problem = f": {isolation.problem}" if isolation.problem else ""
    return ok(f"an agent of this user offers the isolation level {isolation.level}{problem}")


@about(lambda facts: facts.limits)
def _limits(facts: MachineFacts, limits: LimitFacts) -> list[Finding]:
    found = []
    if limits.descriptors is not None and limits.descriptors < _DESCRIPTORS_LOW:
        hard = limits.descriptors_hard
        mend = "sudo prlimit --pid $$ --nofile=65536   (permanently: nofile in /etc/security/limits.conf)"
        if hard is None or hard > limits.descriptors:
            mend = f"ulimit -n {min(hard or 65_536, 65_536)}"
        found += warning(f"a process may open {limits.descriptors} files", mend)
    if limits.processes is not None and limits.processes < _PROCESSES_LOW:
        found += warning(f"this user may have {limits.processes} processes and threads", "ulimit -u 65536")
    if limits.address_space_bytes is not None:
        size = format_bytes(limits.address_space_bytes)
        found += warning(f"the address space is limited to {size}", "ulimit -v unlimited")
    files = "any number of" if limits.descriptors is None else str(limits.descriptors)
    tasks = "any number of" if limits.processes is None else str(limits.processes)
    return found or ok(f"{files} open files, {tasks} processes")


@about(lambda facts: facts.mounts)
def _mounts(facts: MachineFacts, mounts: MountFacts) -> list[Finding]:
    if mounts.problem:
        return warning(
            f"the agent restores environments as links: {mounts.problem}", _AS_ROOT if mounts.is_root else ""
        )
    return ok("the agent can mount environments")


@about(lambda facts: facts.network)
def _ports(facts: MachineFacts, network: NetworkFacts) -> list[Finding]:
    if network.loopback_problem:
        return failed(f"127.0.0.1 cannot be used: {network.loopback_problem}", "ip link set lo up")
    if network.port_problem:
        return failed(network.port_problem)
    if not network.ports:
        return unknown("the kernel's range of local ports is not known")
    share = 100 * network.sockets_used // network.ports
    sentence = f"{network.sockets_used} TCP sockets in use, {network.ports} local ports"
    return warning(sentence) if share >= _PORTS_USED_PERCENT else ok(sentence)


@about(lambda facts: facts.network)
def _hostname(facts: MachineFacts, network: NetworkFacts) -> list[Finding]:
    if network.hostname_problem:
        mend = f"echo 127.0.1.1 {network.hostname} | sudo tee -a /etc/hosts   (or: export GLOO_SOCKET_IFNAME=lo)"
        return warning(f"{network.hostname} does not resolve: {network.hostname_problem}", mend)
    return ok(network.hostname)


def _configuration(facts: MachineFacts) -> list[Finding]:
    home = facts.home
    if isinstance(home, UnknownFact) or not home.root:
        return unknown(NO_HOME)
    return (
        failed(home.configuration_problem)
        if home.configuration_problem
        else ok("config.toml is valid or does not exist")
    )


@about(lambda facts: facts.runs)
def _retention(facts: MachineFacts, runs: RunsFacts) -> list[Finding]:
    days = "for ever" if runs.days is None else f"{runs.days:g} days"
    size = "" if runs.size_bytes_max is None else f", ended runs at most {runs.size_bytes_max / GIB:g} GiB"
    counted = f"{runs.count} run{'' if runs.count == 1 else 's'}, {format_bytes(runs.size_bytes)}"
    sentence = f"{counted}; kept {days}{size}"
    return warning(sentence) if runs.days is None and runs.size_bytes_max is None else ok(sentence)


@about(lambda facts: facts.agent)
def _agent(facts: MachineFacts, agent: AgentFacts) -> list[Finding]:
    if agent.problem:
        return failed(agent.problem, agent.hint)
    if agent.pid is None:
        return ok("no agent is running; the next run starts one")
    return ok(f"pid {agent.pid}, version {agent.version}, {agent.attempts} running, {agent.queued} queued")


def _other_agents(facts: MachineFacts) -> list[Finding]:
    agent = facts.agent
    if isinstance(agent, UnknownFact) or not agent.others:
        return []
    named = ", ".join(f"version {version} (pid {pid})" for pid, version in agent.others.items())
    return warning(f"agents of other versions are running: {named}", f"kill {' '.join(agent.others)}")


@about(lambda facts: facts.cgroups)
def _cgroups(facts: MachineFacts, cgroups: CgroupFacts) -> list[Finding]:
    limits = ", ".join(cgroups.controllers) or "none"
    if not cgroups.path:
        return warning(f"none: {cgroups.problem}; limits: {limits}")
    memory = "" if any(name.startswith("memory") for name in cgroups.controllers) else ", no memory controller"
    return ok(f"v2, kill, limits: {limits}{memory}")


@about(lambda facts: facts.agent)
def _zygote(facts: MachineFacts, agent: AgentFacts) -> list[Finding]:
    if agent.problem:
        return unknown("the agent does not answer")
    mine = [zygote for zygote in agent.zygotes if zygote.python == agent.python]
    cold = [zygote.reason for zygote in mine if zygote.state == "cold"]
    if cold:
        return warning(f"runs of this interpreter start cold: {cold[0]}")
    if mine:
        return ok("; ".join(f"pid {zygote.pid} is {zygote.state}" for zygote in mine))
    return ok("this interpreter has no zygote; its next run starts cold and creates a zygote")


@about(lambda facts: facts.principals)
def _principals(facts: MachineFacts, principals: PrincipalFacts) -> list[Finding]:
    if principals.findings:
        return [finding for sentence in principals.findings for finding in warning(sentence)]
    zygotes = () if isinstance(facts.agent, UnknownFact) else facts.agent.zygotes
    owned = [zygote for zygote in zygotes if zygote.owner and zygote.pid is not None]
    if not principals.count and not owned:
        return []
    memory = format_bytes(sum(zygote.memory_bytes for zygote in owned))
    swept = "no sweep yet" if principals.swept_s is None else f"swept {principals.swept_s:.0f} s ago"
    return ok(f"principals with a uid: {principals.count}; their zygotes: {len(owned)} with {memory}; {swept}")


@about(lambda facts: facts.runs)
def _last_start(facts: MachineFacts, runs: RunsFacts) -> list[Finding]:
    if not runs.last_run:
        return ok("no run yet")
    how = "warm" if runs.warm else f"cold: {runs.warm_reason or 'the receipt contains no reason'}"
    return [Finding(CheckOutcome.OK, f"run {runs.last_run} started {how}")]


CHECKS = (
    Check(
        code="home",
        group=CheckGroup.MACHINE,
        title="The home directory",
        symptoms=("StorageError: neither … nor … can be written to", "UserWarning: … cannot be written to"),
        cause="The home directory holds run directories, locks and the configuration. The home directory must "
        "belong to you and be writable.",
        mend="set SERVERLESS_GPU_HOME to a directory you can write to",
        probe=_home,
    ),
    Check(
        code="home-filesystem",
        group=CheckGroup.MACHINE,
        title="The file system of the home",
        symptoms=(
            "runs start slowly, or results of many GB take long",
            "RunError: the environment could not be restored: … is on a file system that is mounted noexec, …",
            "ImportError: …: failed to map segment from shared object",
        ),
        cause="On a network file system, each small file costs a network round trip. On a noexec file system, "
        "Python cannot load compiled modules from an environment of links.",
        mend="set SERVERLESS_GPU_HOME to a directory on a local disk",
        probe=_home_filesystem,
    ),
    Check(
        code="locks",
        group=CheckGroup.MACHINE,
        title="Locks in the home",
        symptoms=(
            "StorageError: … cannot be used: its file system refuses file locks (flock: Function not implemented)",
            "StorageError: the server's database cannot be kept in …: its file system refuses the locks that SQLite "
            "needs (fcntl: No locks available)",
        ),
        cause="serverless-gpu uses file locks for devices, supervisors and databases. Lustre supports file locks "
        "if mounted with -o flock. NFS supports file locks if its lock service runs. Some FUSE file systems do not "
        "support file locks.",
        mend="set SERVERLESS_GPU_HOME to a directory on a local disk   (for the server only: sgpu up --database "
        "postgresql://…)",
        probe=_locks,
    ),
    Check(
        code="disk-space",
        group=CheckGroup.MACHINE,
        title="Free space",
        symptoms=(
            "StorageError: no space left for …",
            "StorageError: no inodes left for …: its disk has space, but cannot store one more file",
            "RunError: rank 0 finished, but its result could not be written",
        ),
        cause="Arguments, results and logs of runs are files in the home directory. A file system can hold a "
        "limited number of files, regardless of their size.",
        mend="sgpu clean --older-than 7d   (or set SERVERLESS_GPU_HOME to a directory on another disk)",
        probe=_disk_space,
    ),
    Check(
        code="temporary-files",
        group=CheckGroup.MACHINE,
        title="Temporary files",
        symptoms=("FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp', '/var/tmp', …]",),
        cause="Sockets of runs are in /tmp. Libraries in ranks create temporary files. A container with a "
        "read-only root file system has no writable temporary directory.",
        mend="mount a volume at /tmp (Kubernetes: emptyDir; docker run --tmpfs /tmp …)   (or set TMPDIR and "
        "SERVERLESS_GPU_SOCKETS to writable directories)",
        probe=_temporary_files,
    ),
    Check(
        code="shared-memory",
        group=CheckGroup.MACHINE,
        title="Shared memory",
        symptoms=(
            "RuntimeError: DataLoader worker (pid …) is killed by signal: Bus error. "
            "It is possible that dataloader's workers are out of shared memory.",
            "RuntimeError: unable to write to file </torch_…>",
        ),
        cause="DataLoader workers and NCCL pass data through /dev/shm, which has 64 MB in a container by default.",
        mend="docker run --shm-size=8g …   (or --ipc=host; on a host: sudo mount -o remount,size=50% /dev/shm)",
        probe=_shared_memory,
    ),
    Check(
        code="sockets",
        group=CheckGroup.MACHINE,
        title="The directory of sockets",
        symptoms=("StorageError: … belongs to another user or is a link",),
        cause="Client, agent and supervisors connect through Unix sockets in a private directory with a short path.",
        mend="set SERVERLESS_GPU_SOCKETS to a short path of a private directory, the same for all processes",
        probe=_sockets,
    ),
    Check(
        code="kernel",
        group=CheckGroup.MACHINE,
        title="The kernel",
        symptoms=(
            "HardwareError: this machine cannot run ranks: Linux … refuses pidfd_open here: Function not implemented",
            "HardwareError: this machine cannot run ranks: this build of Python has no os.pidfd_open",
        ),
        cause="The supervisor uses pidfds, so that it never signals an unrelated process that reuses a process "
        f"id. The oldest versions that support pidfds are Linux {OLDEST} and Docker 20.10.",
        mend=f"run Linux {OLDEST} or newer; in a container: Docker 20.10 or newer, or docker run --security-opt "
        "seccomp=unconfined …",
        probe=_kernel,
    ),
    Check(
        code="isolation",
        group=CheckGroup.MACHINE,
        title="Isolation of runs on this machine",
        symptoms=("`sgpu node show` prints the isolation level none for this machine",),
        cause="A node measures its isolation level with a trial. Sandboxes need root, a spawner or subordinate uids, "
        "Linux 6.12 or newer, and a writable cgroup v2. A container or a security module can prevent the trial.",
        mend="remove the reason that the check names, then start `sgpu up` or `sgpu join` again",
        probe=_isolation,
    ),
    Check(
        code="limits",
        group=CheckGroup.MACHINE,
        title="Process limits",
        symptoms=(
            "OSError: [Errno 24] Too many open files",
            "RuntimeError: can't start new thread",
            "BlockingIOError: [Errno 11] Resource temporarily unavailable",
        ),
        cause="Ranks inherit the limits of the calling process. DataLoader workers and NCCL need many descriptors.",
        mend="raise the limit in the shell that starts the caller: ulimit -n 65536",
        probe=_limits,
    ),
    Check(
        code="ports",
        group=CheckGroup.MACHINE,
        title="Loopback and ports",
        symptoms=(
            "RunError: no free rendezvous port was found",
            "torch.distributed.DistNetworkError: The server socket has failed to listen … EADDRINUSE",
        ),
        cause="Ranks connect through a port of this machine that the run reserves. The kernel had no free port.",
        mend="close leaked connections (`ss -tan | wc -l` counts them), or widen net.ipv4.ip_local_port_range",
        probe=_ports,
    ),
    Check(
        code="hostname",
        group=CheckGroup.MACHINE,
        title="The machine's host name",
        symptoms=("RuntimeError: … gloo … Unable to resolve hostname to a (local) address",),
        cause="Gloo resolves the machine's own name to find the address on which it listens.",
        mend="add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo",
        probe=_hostname,
    ),
    Check(
        code="mounts",
        group=CheckGroup.MACHINE,
        title="Mounting environments",
        symptoms=(
            "environment: snapshot …, links (no mounts: …) in the receipt",
            "RunError: the environment could not be restored: SERVERLESS_GPU_RESTORE=overlay, and this machine cannot "
            "mount environments: …",
        ),
        cause='With env="snapshot" the agent mounts a restored environment in a separate namespace, which takes '
        "milliseconds. If the kernel refuses namespaces, the agent uses hard links. With hard "
        "links, each change of the environment requires a new directory tree and a cold start.",
        mend="sudo sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=65536   "
        "(Ubuntu 24.04: also kernel.apparmor_restrict_unprivileged_userns=0; in a container: "
        "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined …; as root of a container: "
        "docker run --cap-add SYS_ADMIN --security-opt apparmor=unconfined …)",
        probe=_mounts,
    ),
    Check(
        code="configuration",
        group=CheckGroup.MACHINE,
        title="config.toml",
        symptoms=("InvalidValue: …/config.toml has unknown tables: …",),
        cause="The agent reads the whole configuration and refuses a file with a mistake.",
        mend="correct config.toml; docs/reference.md lists its tables",
        probe=_configuration,
    ),
    Check(
        code="retention",
        group=CheckGroup.MACHINE,
        title="Retention of runs",
        symptoms=(
            "ResultUnavailableHere: rank 0 returned a value, but the files of run … were deleted",
            "InvalidValue: run '…' does not exist in …",
        ),
        cause="The agent deletes directories of ended runs after some days. If ended runs exceed the "
        "size limit, the agent deletes the oldest run directories first.",
        mend="set days and gib in the table [retention] of config.toml; 0 means no limit",
        probe=_retention,
    ),
    Check(
        code="agent",
        group=CheckGroup.AGENT,
        title="The agent",
        symptoms=(
            "AgentUnavailable: the agent of this node did not come up within 30 s",
            "AgentUnavailable: the agent of this node (pid …) did not answer within 10 s",
        ),
        cause="One agent starts all runs of a user in a home directory. An agent that is stopped (Ctrl-Z, SIGSTOP) or "
        "swapped out cannot answer.",
        mend="kill -9 PID, with the PID from the message   (running attempts continue)",
        probe=_agent,
    ),
    Check(
        code="other-agents",
        group=CheckGroup.AGENT,
        title="Agents of other versions",
        symptoms=("after an upgrade, older notebooks behave as before",),
        cause="Each version of this package has its own agent. An unused agent ends after ten minutes.",
        mend="restart the processes that use the old version; running attempts continue",
        probe=_other_agents,
    ),
    Check(
        code="cgroups",
        group=CheckGroup.AGENT,
        title="Cgroups",
        symptoms=("notes: memory= is not enforced: no memory controller can be written to on this machine",),
        cause="With a writable cgroup v2, the supervisor limits and ends the whole process tree of a run at once. "
        "Without a cgroup, the supervisor ends one process at a time. Without a cgroup, memory= may have no effect.",
        mend="start the caller in a delegated cgroup: systemd-run --user --scope -p Delegate=yes …   (or mount "
        "/sys/fs/cgroup writable in the container)",
        probe=_cgroups,
    ),
    Check(
        code="zygote",
        group=CheckGroup.AGENT,
        title="Warm starts",
        symptoms=("cold start (…) in the receipt",),
        cause="The agent forks ranks from a zygote, an interpreter that has already imported torch. The zygote "
        "must have one thread, no child process from start-up code, no CUDA, and the caller's packages. "
        "Runs of a server's users also need user namespaces to use a zygote.",
        mend="move code that starts threads or processes, or uses CUDA, out of sitecustomize.py and .pth files, "
        "then: sgpu stop   (user namespaces in a container: allow unshare in its seccomp profile)",
        probe=_zygote,
    ),
    Check(
        code="principals",
        group=CheckGroup.AGENT,
        title="What principals left behind",
        symptoms=(
            "IsolationUnavailable: uid … of … stays reserved, because something remains: …",
            "cold start (processes of no run were in the sandbox of the previous interpreter: …) in the receipt",
        ),
        cause="Processes, files, shared memory and scheduled jobs of a principal can outlive its attempts outside of a "
        "sandbox. The agent removes unused files and shared memory after an hour. The agent reports everything else.",
        mend="read the finding, then: sgpu node sweep   (as root on the node; a principal who has left: "
        "sgpu node sweep --forget NAME)",
        probe=_principals,
    ),
    Check(
        code="last-start",
        group=CheckGroup.AGENT,
        title="The last start of a run",
        symptoms=("the first call takes seconds, later ones milliseconds",),
        cause="The first run of an interpreter starts cold. A run after a change to an imported package also "
        "starts cold.",
        mend="no action is needed; @distributed in a script or notebook starts a zygote in the background",
        probe=_last_start,
    ),
)
