"""The canary's catalogue: attempts to break out of a run, and the verdict on each.

    outcome of the attempt in the run ─┐
                                       ├─ judge ─▶ possible │ refused │ unknown ─▶ CanaryReport
    outcome of its control ────────────┘

A *control* is the same attempt, which the node starts without isolation on the same targets. A refusal counts only if
the control has succeeded. Without a successful control, a missing target or a bug of the attempt would look like a
refusal. The verdict is then unknown. An attempt that succeeds is possible, regardless of its control.

`node/inside/canary/` contains the code of the attempts. `docs/concepts/isolation.md` lists the attempts that remain
open at the level `user`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec

Outcome = Literal["possible", "refused", "no_target", "failed"]
"""Outcome of an attempt or of its control. "failed": the attempt itself broke."""
Verdict = Literal["possible", "refused", "unknown"]
Control = Literal["same", "prepared", "observed"]
"""Kind of a control.

"same": the machine itself is the target. "prepared": the node or another principal's run prepares the target.
"observed": the node inspects the run, or searches for its remains.
"""
USER, SANDBOX = "user", "sandbox"
_BOTH, _SANDBOX, _NONE = frozenset({USER, SANDBOX}), frozenset({SANDBOX}), frozenset[str]()


class Measure(NamedTuple):
    """A measure that refuses attempts, and the remedy if an attempt is possible."""

    name: str
    remedy: str


UID = Measure("own uid", "check that the principal's uid is not 0 and owns no file of the node")
VIEW = Measure("private root", "check the mounts of the sandbox: the run must not see this path")
PROCESSES = Measure("pid namespace", "check that the run has its own pid namespace and its own /proc")
IPC = Measure("IPC namespace", "check that the run has its own IPC namespace")
SCOPE = Measure("Landlock scope", "start Linux 6.12 or newer, with Landlock among the security modules")
FILTER = Measure("seccomp filter", "check that the kernel has seccomp filters, and that the run uses one")
KEYRING = Measure("own keyring", "check that the run has its own session keyring")
CAPABILITIES = Measure("no capabilities", "check that the run's processes hold no capability")
NO_NEW_PRIVILEGES = Measure("no_new_privs", "check the flag NoNewPrivs in /proc/PID/status of the run")
DEVICES = Measure("private /dev", "check that the run sees only the device nodes of its attempt")
STEM = Measure("sealed stem", "check that the stem is not dumpable")
CGROUP = Measure("cgroup limits", "give the node's agent a cgroup with the controllers pids and memory")
EGRESS = Measure("egress rules", "restrict the egress of the pool, and install nftables on the node")
END = Measure("end of the run", "check that the supervisor ends all processes of an attempt")
QUOTA = Measure("disk quota", "put the node's home directory and the principals' homes on separate disks")
SERVER = Measure("token check of the server", "rotate the tokens of the server (`sgpu server rotate`)")


class CanaryAttempt(NamedTuple):
    """An attempt to break out of a run.

    Attributes:
        group: heading in the report.
        text: what the attempt tries, as a phrase.
        actor: who could try it: a member of the team, or a compromised package in a member's environment.
        measure: the first measure that refuses the attempt.
        refused_at: isolation levels that must refuse the attempt.
        control: kind of the control.
    """

    name: str
    group: str
    text: str
    measure: Measure
    refused_at: frozenset[str] = _BOTH
    control: Control = "prepared"
    actor: str = "member"


PACKAGE_ACTOR = "package"
FILES, CACHES, PROCESS, COMMUNICATION = "files", "caches", "processes", "communication"
DEVICE, KERNEL, NETWORK, RESOURCES, REMAINS = "devices", "kernel", "network", "resources", "remains"
GROUPS = (FILES, CACHES, PROCESS, COMMUNICATION, DEVICE, KERNEL, NETWORK, RESOURCES, REMAINS)


def _all_of(group: str, *attempts: CanaryAttempt) -> tuple[CanaryAttempt, ...]:
    return tuple(each._replace(group=group) for each in attempts)


def _try(
    name: str,
    text: str,
    measure: Measure,
    refused_at: frozenset[str] = _BOTH,
    control: Control = "prepared",
    actor: str = "member",
) -> CanaryAttempt:
    return CanaryAttempt(name, "", text, measure, refused_at, control, actor)


ATTEMPTS: tuple[CanaryAttempt, ...] = (
    *_all_of(
        FILES,
        _try("server-key", "read the key of the server", UID),
        _try("administrator-token", "read the token of the server's administrator", UID),
        _try("node-token", "read the token of the node", UID),
        _try("node-key", "read the private key of the node", UID),
        _try("join-token", "read the token with which nodes join", UID),
        _try("ray-token", "read the token of the pool's Ray cluster", UID),
        _try("database", "read the database of the server", UID),
        _try("attempt-token", "read the token of another run's attempt", UID),
        _try("other-log", "read the output of another run", UID),
        _try("forge-log", "add a line to the output of another run", UID),
        _try("other-arguments", "read the specification of another run", UID),
        _try("other-result", "read the result of another run", UID),
        _try("own-facts", "forge the facts of the own run, which the server bills", UID),
        _try("other-facts", "forge the facts of another run", UID),
        _try("own-receipt", "create a file beside the receipt of the own run", UID),
        _try("own-order", "change the specification of the own run", UID),
        _try("other-secret", "read a secret of another run", UID),
        _try("other-home", "read a file in the home directory of another principal", UID),
        _try("node-home", "read a private file of the node's account", UID),
        _try("uid-map", "change the map of principals to uids", UID),
        _try("list-other-runs", "list the runs of the node", UID),
        _try("passwords", "read the password hashes of the machine", UID, control="same"),
        _try("accounts", "change the accounts of the machine", UID, control="same"),
        _try("public-file", "read a file of the machine that every account may read", VIEW, _SANDBOX),
        _try("public-tmp-file", "read a file in /tmp that every account may read", VIEW, _SANDBOX),
        _try("root-of-init", "read a file of the machine through /proc/1/root", PROCESSES),
        _try("file-by-handle", "open a file by its inode instead of its path", CAPABILITIES),
        _try("inherited-descriptor", "use a file descriptor that the node left open", UID),
    ),
    *_all_of(
        CACHES,
        _try("cached-unit", "read a unit of another principal's environment", UID, actor=PACKAGE_ACTOR),
        _try("poison-unit", "change a unit in the cache of environments", UID, actor=PACKAGE_ACTOR),
        _try("poison-cache", "create a file in the cache of environments", UID, actor=PACKAGE_ACTOR),
        _try("poison-package", "change the code of serverless-gpu", UID, actor=PACKAGE_ACTOR),
        _try("poison-interpreter", "change Python's standard library", UID, control="same", actor=PACKAGE_ACTOR),
    ),
    *_all_of(
        PROCESS,
        _try("agent-variables", "read the environment variables of the agent", UID),
        _try("supervisor-variables", "read the environment variables of another run's supervisor", UID),
        _try("rank-variables", "read the environment variables of another run", UID),
        _try("rank-arguments", "read the command line of another run", PROCESSES, _SANDBOX),
        _try("rank-memory", "change the memory of another run", UID),
        _try("rank-memory-call", "read the memory of another run with process_vm_readv", UID),
        _try("rank-descriptors", "list the open files of another run", UID),
        _try("rank-files", "read a file in the view of another run", UID),
        _try("take-descriptor", "take an open file from another run", UID),
        _try("trace-rank", "trace a process of another run", UID),
        _try("signal-rank", "send a signal to another run", UID),
        _try("slow-rank", "move another run to other processors", UID),
        _try("limit-rank", "change the resource limits of another run", UID),
        _try("enter-rank", "enter the mount namespace of another run", UID),
        _try("end-supervisor", "end a supervisor", UID),
        _try("patch-supervisor", "change the memory of a supervisor", UID),
        _try("end-agent", "end the agent of the node", UID),
        _try("end-ray", "end Ray on the node", UID),
        _try("patch-zygote", "change the memory of another principal's zygote", UID),
        _try("end-zygote", "end another principal's zygote", UID),
        _try("trace-stem", "trace the stem of the own run", STEM),
        _try("become-root", "become root", CAPABILITIES, control="same"),
        _try("become-other", "become another principal", CAPABILITIES),
    ),
    *_all_of(
        COMMUNICATION,
        _try("shared-memory-file", "read a segment in /dev/shm that every account may read", VIEW, _SANDBOX),
        _try("shared-memory", "attach a System V segment that every account may use", IPC, _SANDBOX),
        _try("semaphore", "read a System V semaphore that every account may use", IPC, _SANDBOX),
        _try("message-queue", "send to a System V message queue that every account may use", IPC, _SANDBOX),
        _try("posix-message-queue", "open a POSIX message queue that every account may use", IPC, _SANDBOX),
        _try("abstract-socket", "connect to an abstract socket", SCOPE, _SANDBOX),
        _try("public-socket", "connect to a socket in /tmp that every account may use", VIEW, _SANDBOX),
        _try("service-socket", "connect to a socket in /run that every account may use", VIEW, _SANDBOX),
        _try("agent-socket", "connect to the socket of the agent", UID),
        _try("supervisor-socket", "connect to the socket of another run's supervisor", UID),
        _try("ray-socket", "connect to Ray's socket on the node", UID),
        _try("session-key", "find a key in the session keyring of the node", KEYRING),
    ),
    *_all_of(
        DEVICE,
        _try("other-device", "open a device node that the run did not get", DEVICES, _SANDBOX),
        _try("raw-disk", "read a disk of the machine", UID, control="same"),
        _try("make-device", "make a device node", CAPABILITIES, control="same"),
        _try("kernel-log", "read the log of the kernel", UID, control="same"),
        _try("io-ports", "reach the processor's I/O ports", CAPABILITIES, control="same"),
    ),
    *_all_of(
        KERNEL,
        _try("mount-files", "mount a file system", CAPABILITIES, control="same"),
        _try("mount-devices", "mount the machine's device nodes", CAPABILITIES, control="same"),
        _try("mount-cgroups", "mount the machine's cgroups", CAPABILITIES, control="same"),
        _try("mount-by-descriptor", "create a mount with fsopen and fsmount", CAPABILITIES, control="same"),
        _try("user-namespace", "create a user namespace", FILTER, _SANDBOX, control="same"),
        _try("user-namespace-clone3", "create a user namespace with clone3", FILTER, _SANDBOX, control="same"),
        _try("mount-namespace", "create a mount namespace", CAPABILITIES, control="same"),
        _try("network-namespace", "create a network namespace", CAPABILITIES, control="same"),
        _try("change-root", "change the root directory", CAPABILITIES, control="same"),
        _try("setuid-program", "get the rights of root through a setuid program", NO_NEW_PRIVILEGES, control="same"),
        _try("capabilities", "hold a capability", CAPABILITIES, control="same"),
        _try("kernel-program", "create a BPF map", FILTER, control="same"),
        _try("performance-events", "count events of the whole machine", FILTER, control="same"),
        _try("page-fault-handler", "handle page faults in user space", FILTER, _SANDBOX, control="same"),
        _try("io-uring", "create an io_uring", FILTER, _SANDBOX, control="same"),
        _try("key-ring", "create a keyring", FILTER, _SANDBOX, control="same"),
        _try("replace-kernel", "load another kernel", CAPABILITIES, control="same"),
        _try("kernel-module", "load a kernel module", CAPABILITIES, control="same"),
        _try("restart-machine", "restart the machine", CAPABILITIES, control="same"),
        _try("swap", "add swap space", CAPABILITIES, control="same"),
        _try("host-name", "change the host name", CAPABILITIES, control="same"),
        _try("core-pattern", "choose the program that gets core dumps", UID, control="same"),
        _try("kernel-setting", "change a setting in /proc/sys", UID, control="same"),
        _try("system-request", "send a system request (sysrq) to the kernel", UID, control="same"),
        _try("machine-setting", "change a setting in /sys", UID, control="same"),
        _try("leave-cgroup", "leave the cgroup of the run", UID),
        _try("read-cgroup", "read the cgroups of the machine", VIEW, _SANDBOX),
        _try("release-agent", "choose the program that the kernel starts for empty cgroups", UID),
    ),
    *_all_of(
        NETWORK,
        _try("server-port", "connect to the server", EGRESS),
        _try("database-port", "connect to the database of the server", EGRESS),
        _try("ray-port", "connect to the Ray cluster of the pool, at its head or on the own node", EGRESS),
        _try("other-ray-port", "connect to Ray on another node", EGRESS),
        _try("other-node-port", "connect to another node (SSH)", EGRESS, control="same"),
        _try("node-port", "connect to a port of the node's account", EGRESS),
        _try("other-run-port", "connect to a port of another run", EGRESS),
        _try("metadata-address", "connect to the metadata service of a cloud", EGRESS, control="same"),
        _try("replay-node-token", "use the token of the node for a request to the server", SERVER),
        _try("raw-socket", "read all packets of the machine", CAPABILITIES, control="same"),
        _try("mark-packets", "mark packets, which egress rules could accept", CAPABILITIES, control="same"),
    ),
    *_all_of(
        RESOURCES,
        _try("exhaust-processes", "start as many processes as the machine allows", CGROUP, control="observed"),
        _try("exhaust-memory", "use more memory than memory= allows", CGROUP),
        _try(
            "exhaust-memory-unasked",
            "use all memory, in a run without memory=",
            CGROUP,
            _NONE,
            control="observed",
        ),
        _try("fill-tmp", "fill the machine's /tmp", VIEW, _SANDBOX),
        _try("fill-shared-memory", "fill the machine's /dev/shm", VIEW, _SANDBOX),
        _try("fill-disk", "fill the disk of the node", QUOTA, _NONE),
        _try("fill-inodes", "use all inodes on the disk of the node", QUOTA, _NONE),
        _try("open-files", "raise the limit on open files", CAPABILITIES, control="same"),
        _try("raise-priority", "raise the priority of a process", CAPABILITIES, control="same"),
        _try("real-time", "get real-time priority", CAPABILITIES, control="same"),
        _try("memory-killer", "avoid the out-of-memory killer", CAPABILITIES, control="same"),
    ),
    *_all_of(
        REMAINS,
        _try("leave-process", "leave a process behind", END, control="observed"),
        _try("leave-file", "leave a file in /tmp behind", VIEW, _SANDBOX, control="observed"),
        _try("leave-segment", "leave a segment in /dev/shm behind", VIEW, _SANDBOX, control="observed"),
        _try("leave-shared-memory", "leave a System V segment behind", IPC, _SANDBOX, control="observed"),
        _try("leave-message-queue", "leave a POSIX message queue behind", IPC, _SANDBOX, control="observed"),
        _try("leave-timer", "create a timer of cron or systemd", UID),
    ),
)


class CanaryRow(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one attempt.

    Attributes:
        required: True if the node's isolation level must refuse the attempt.
        detail: reason of a refusal, or reason why the verdict is unknown.
    """

    attempt: str
    group: str
    text: str
    verdict: Verdict
    required: bool
    measure: str
    remedy: str = ""
    detail: str = ""


class CanaryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The verdicts of one canary on one node.

    Attributes:
        level: isolation level of the canary's run.
        at_ns: time of the report, in nanoseconds since 1970.
        version: version of serverless-gpu on the node.
        problem: reason why the canary could not run, or "". A report with a problem proves nothing.
    """

    node: str
    level: str
    at_ns: int
    version: str
    rows: tuple[CanaryRow, ...] = ()
    problem: str = ""

    @property
    def failed(self) -> bool:
        """Return True if the level does not keep its promise, or if the canary could not run."""
        return bool(self.problem) or any(row.required and row.verdict == "possible" for row in self.rows)


class Trial(NamedTuple):
    """Outcome of an attempt or of its control, with its detail."""

    outcome: Outcome
    detail: str = ""


def judge(attempt: Trial | None, control: Trial | None) -> tuple[Verdict, str]:
    """Return the verdict on an attempt, with the reason. None means that the node has no outcome."""
    if attempt is not None and attempt.outcome == "possible":
        return "possible", attempt.detail
    if attempt is None:
        return "unknown", "the run ended before the attempt"
    if attempt.outcome != "refused":
        return "unknown", attempt.detail
    if control is None:
        return "unknown", "the node could not start the control"
    if control.outcome != "possible":
        return "unknown", f"the control did not succeed: {control.detail or control.outcome}"
    return "refused", attempt.detail


def rows(level: str, attempts: Mapping[str, Trial], controls: Mapping[str, Trial]) -> tuple[CanaryRow, ...]:
    """Return the verdicts on all attempts of the catalogue, in its order."""
    found: list[CanaryRow] = []
    for each in ATTEMPTS:
        verdict, detail = judge(attempts.get(each.name), controls.get(each.name))
        found.append(
            CanaryRow(
                attempt=each.name,
                group=each.group,
                text=each.text,
                verdict=verdict,
                required=level in each.refused_at,
                measure=each.measure.name,
                remedy=each.measure.remedy if verdict == "possible" else "",
                detail=detail,
            )
        )
    return tuple(found)


def open_at(level: str) -> tuple[CanaryAttempt, ...]:
    """Return the attempts that a level does not refuse."""
    return tuple(each for each in ATTEMPTS if level not in each.refused_at)


def count(found: Iterable[CanaryRow], verdict: Verdict) -> int:
    """Return the number of rows with a verdict."""
    return sum(row.verdict == verdict for row in found)
