"""The doctor's checks of machine and agent: what is fine, what is not, what is unknown."""

from __future__ import annotations

import pytest

from serverless_gpu.doctor.facts import (
    AgentFacts,
    CgroupFacts,
    CheckOutcome,
    Disk,
    HomeFacts,
    IsolationFacts,
    KernelFacts,
    LimitFacts,
    MachineFacts,
    MountFacts,
    NetworkFacts,
    PrincipalFacts,
    RunsFacts,
)
from serverless_gpu.node.base.protocol import ZygoteStatus
from tests.support.doctor.diagnosed import FAILED, GIB, OK, PYTHON, UNKNOWN, WARNING, found, one
from tests.support.golden import golden

FEWER_FILES = (
    "delete files there (sgpu clean --older-than 7d; sgpu env gc)   (or set SERVERLESS_GPU_HOME to a directory on a "
    "disk with more inodes; `df -i` shows them)"
)


@pytest.mark.parametrize(
    ("code", "home", "expected"),
    [
        ("home", HomeFacts(root="/h"), (OK, "/h, writable", "")),
        ("home", HomeFacts(problem="no space", hint="free some"), (FAILED, "no space", "free some")),
        ("home", HomeFacts(root="/t", note="/h cannot be written to"), (WARNING, "/h cannot be written to", "")),
        ("home-filesystem", HomeFacts(root="/h", filesystem="ext4"), (OK, "ext4", "")),
        (
            "home-filesystem",
            HomeFacts(root="/h", filesystem="nfs4"),
            (WARNING, "/h is on nfs4, a network file system", ""),
        ),
        ("home-filesystem", HomeFacts(root="/h"), (UNKNOWN, "the type of the file system of /h is not known", "")),
        ("home-filesystem", HomeFacts(problem="x"), (UNKNOWN, "no home directory is available", "")),
        ("locks", HomeFacts(root="/h"), (OK, "granted", "")),
        (
            "locks",
            HomeFacts(root="/h", flock_refusal="no locks", record_lock_refusal="no locks"),
            (FAILED, "the file system of /h refuses file locks: flock: no locks", ""),
        ),
        (
            "locks",
            HomeFacts(root="/h", record_lock_refusal="no locks"),
            (WARNING, "the file system of /h refuses the locks of SQLite: fcntl: no locks", ""),
        ),
        ("disk-space", HomeFacts(root="/h", disks=(Disk("/h", 100 * GIB, 50 * GIB),)), (OK, "53.7 GB in /h free", "")),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 1000 * GIB, 4 * GIB),)),
            (WARNING, "/h has 4.3 GB free of 1.1 TB", ""),
        ),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 10 * GIB, 1000),)),
            (FAILED, "/h has 1.0 kB free of 10.7 GB", ""),
        ),
        ("temporary-files", HomeFacts(root="/h"), (OK, "temporary files can be created", "")),
        ("temporary-files", HomeFacts(root="/h", temporary_problem="none"), (FAILED, "none", "")),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 100 * GIB, 50 * GIB, 6_000_000, 9_999),)),
            (WARNING, "/h has 9999 of 6000000 inodes left; each new file needs an inode", FEWER_FILES),
        ),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 100 * GIB, 50 * GIB, 6_000_000, 9),)),
            (FAILED, "/h has 9 of 6000000 inodes left; each new file needs an inode", FEWER_FILES),
        ),
        (
            "disk-space",
            HomeFacts(root="/h", disks=(Disk("/h", 100 * GIB, 50 * GIB, 6_000_000, 5_000_000),)),
            (OK, "53.7 GB in /h free", ""),
        ),
        ("disk-space", HomeFacts(root="/h"), (UNKNOWN, "statvfs failed for every file system", "")),
        ("sockets", HomeFacts(root="/h", sockets="/s"), (OK, "/s", "")),
        ("sockets", HomeFacts(root="/h", sockets_problem="/s is a link"), (FAILED, "/s is a link", "")),
        ("configuration", HomeFacts(root="/h"), (OK, "config.toml is valid or does not exist", "")),
        ("configuration", HomeFacts(root="/h", configuration_problem="bad"), (FAILED, "bad", "")),
    ],
)
def test_the_home(code: str, home: HomeFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one(code, MachineFacts(home=home)) == expected


def test_23C6_a_home_without_execution_matters_where_environments_are_made_of_links() -> None:
    home = HomeFacts(root="/h", filesystem="ext4", is_noexec=True)
    assert one("home-filesystem", MachineFacts(home=home, mounts=MountFacts()))[0] is OK
    outcome, sentence, mend = one("home-filesystem", MachineFacts(home=home, mounts=MountFacts(problem="refused")))
    assert (outcome, sentence) == (
        FAILED,
        golden("doctor.doctor_machine.mounted-noexec-env"),
    )
    assert "remount,exec" in mend


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (KernelFacts(release="6.1"), (OK, "Linux 6.1", "")),
        (
            KernelFacts(release="4.18", pidfd_refusal="Linux 4.18 refuses pidfd_open here: no", hint="a newer one"),
            (FAILED, "no run can start: Linux 4.18 refuses pidfd_open here: no", "a newer one"),
        ),
    ],
)
def test_the_kernel(kernel: KernelFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("kernel", MachineFacts(kernel=kernel)) == expected


@pytest.mark.parametrize(
    ("isolation", "expected"),
    [
        (IsolationFacts(level="sandbox"), "an agent of this user offers the isolation level sandbox"),
        (IsolationFacts(problem="no root"), "an agent of this user offers the isolation level none: no root"),
    ],
)
def test_the_isolation_level_of_this_machine(isolation: IsolationFacts, expected: str) -> None:
    assert one("isolation", MachineFacts(isolation=isolation)) == (OK, expected, "")


@pytest.mark.parametrize(
    ("mounts", "expected"),
    [
        (MountFacts(), (OK, "the agent can mount environments", "")),
        (
            MountFacts(problem="a user namespace cannot be made: Operation not permitted"),
            (
                WARNING,
                "the agent restores environments as links: a user namespace cannot be made: Operation not permitted",
                "",
            ),
        ),
        (
            MountFacts(problem="a mount namespace cannot be made: Operation not permitted", is_root=True),
            (
                WARNING,
                "the agent restores environments as links: a mount namespace cannot be made: Operation not permitted",
                "docker run --cap-add SYS_ADMIN --security-opt apparmor=unconfined …   "
                "(Kubernetes: securityContext.capabilities.add: [SYS_ADMIN])",
            ),
        ),
    ],
)
def test_mounting_environments(mounts: MountFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("mounts", MachineFacts(mounts=mounts)) == expected


@pytest.mark.parametrize(
    ("code", "limits", "expected"),
    [
        (
            "shared-memory",
            LimitFacts(shared_memory=Disk("/dev/shm", 8 * GIB, 8 * GIB)),
            (OK, "/dev/shm has 8.6 GB free", ""),
        ),
        (
            "shared-memory",
            LimitFacts(shared_memory=Disk("/dev/shm", 64 << 20, 64 << 20)),
            (WARNING, "/dev/shm has 67.1 MB free", ""),
        ),
        ("shared-memory", LimitFacts(), (FAILED, "/dev/shm does not exist", "")),
        ("limits", LimitFacts(descriptors=4096, processes=None), (OK, "4096 open files, any number of processes", "")),
        (
            "limits",
            LimitFacts(descriptors=256, descriptors_hard=4096),
            (WARNING, "a process may open 256 files", "ulimit -n 4096"),
        ),
        (
            "limits",
            LimitFacts(processes=100),
            (WARNING, "this user may have 100 processes and threads", "ulimit -u 65536"),
        ),
        (
            "limits",
            LimitFacts(address_space_bytes=GIB),
            (WARNING, "the address space is limited to 1.1 GB", "ulimit -v unlimited"),
        ),
    ],
)
def test_limits(code: str, limits: LimitFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one(code, MachineFacts(limits=limits)) == expected


@pytest.mark.parametrize(
    ("code", "network", "expected"),
    [
        ("ports", NetworkFacts(ports=28_000, sockets_used=12), (OK, "12 TCP sockets in use, 28000 local ports", "")),
        (
            "ports",
            NetworkFacts(ports=1000, sockets_used=900),
            (WARNING, "900 TCP sockets in use, 1000 local ports", ""),
        ),
        ("ports", NetworkFacts(), (UNKNOWN, "the kernel's range of local ports is not known", "")),
        ("ports", NetworkFacts(port_problem="none"), (FAILED, "none", "")),
        (
            "ports",
            NetworkFacts(loopback_problem="down"),
            (FAILED, "127.0.0.1 cannot be used: down", "ip link set lo up"),
        ),
        ("hostname", NetworkFacts(hostname="box"), (OK, "box", "")),
        (
            "hostname",
            NetworkFacts(hostname="box", hostname_problem="no answer"),
            (
                WARNING,
                "box does not resolve: no answer",
                "echo 127.0.1.1 box | sudo tee -a /etc/hosts   (or: export GLOO_SOCKET_IFNAME=lo)",
            ),
        ),
    ],
)
def test_the_network(code: str, network: NetworkFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one(code, MachineFacts(network=network)) == expected


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        (
            RunsFacts(count=1, size_bytes=2000, days=30.0, size_bytes_max=20 * GIB),
            (OK, "1 run, 2.0 kB; kept 30 days, ended runs at most 20 GiB", ""),
        ),
        (RunsFacts(count=2, days=0.5), (OK, "2 runs, 0 B; kept 0.5 days", "")),
        (RunsFacts(), (WARNING, "0 runs, 0 B; kept for ever", "")),
    ],
)
def test_retention(runs: RunsFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("retention", MachineFacts(runs=runs)) == expected


@pytest.mark.parametrize(
    ("agent", "expected"),
    [
        (AgentFacts(), (OK, "no agent is running; the next run starts one", "")),
        (AgentFacts(pid=7, version="0.1", attempts=2, queued=1), (OK, "pid 7, version 0.1, 2 running, 1 queued", "")),
        (AgentFacts(problem="it does not answer", hint="kill -9 7"), (FAILED, "it does not answer", "kill -9 7")),
    ],
)
def test_the_agent(agent: AgentFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("agent", MachineFacts(agent=agent)) == expected


def test_agents_of_other_versions() -> None:
    agent = AgentFacts(others={"9": "0.0, protocol 1", "12": "0.2, protocol 2"})
    assert one("other-agents", MachineFacts(agent=agent)) == (
        WARNING,
        golden("doctor.doctor_machine.others-beside-version"),
        "kill 9 12",
    )
    assert found("other-agents", MachineFacts(agent=AgentFacts(pid=1))) == []


@pytest.mark.parametrize(
    ("cgroups", "expected"),
    [
        (CgroupFacts(path="/c", controllers=("memory", "pids")), (OK, "v2, kill, limits: memory, pids", "")),
        (CgroupFacts(path="/c", controllers=("pids",)), (OK, "v2, kill, limits: pids, no memory controller", "")),
        (CgroupFacts(path="/c"), (OK, "v2, kill, limits: none, no memory controller", "")),
        (
            CgroupFacts(problem="no cgroup v2 directory is ours to write", controllers=("memory (v1)",)),
            (WARNING, "none: no cgroup v2 directory is ours to write; limits: memory (v1)", ""),
        ),
    ],
)
def test_cgroups(cgroups: CgroupFacts, expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("cgroups", MachineFacts(cgroups=cgroups)) == expected


@pytest.mark.parametrize(
    ("zygotes", "expected"),
    [
        ((), (OK, "this interpreter has no zygote; its next run starts cold and creates a zygote", "")),
        ((ZygoteStatus(pid=5, python=PYTHON, state="ready"),), (OK, "pid 5 is ready", "")),
        (
            (
                ZygoteStatus(pid=5, python="/other/python", state="ready"),
                ZygoteStatus(python=PYTHON, state="cold", reason="it has 3 threads"),
            ),
            (WARNING, "runs of this interpreter start cold: it has 3 threads", ""),
        ),
    ],
)
def test_zygotes(zygotes: tuple[ZygoteStatus, ...], expected: tuple[CheckOutcome, str, str]) -> None:
    assert one("zygote", MachineFacts(agent=AgentFacts(pid=1, python=PYTHON, zygotes=zygotes))) == expected


@pytest.mark.parametrize(
    ("principals", "zygotes", "expected"),
    [
        (PrincipalFacts(), (), []),
        (PrincipalFacts(), (ZygoteStatus(pid=5, python=PYTHON, state="ready"),), []),
        (
            PrincipalFacts(count=2, swept_s=61.4),
            (
                ZygoteStatus(pid=5, python=PYTHON, state="ready", owner="ana of s", memory_bytes=150_000_000),
                ZygoteStatus(pid=6, python=PYTHON, state="ready", owner="bob of s", memory_bytes=150_000_000),
                ZygoteStatus(python=PYTHON, state="cold", owner="bob of s", reason="it has 3 threads"),
            ),
            [(OK, "principals with a uid: 2; their zygotes: 2 with 300.0 MB; swept 61 s ago", "")],
        ),
        (PrincipalFacts(count=1), (), [(OK, "principals with a uid: 1; their zygotes: 0 with 0 B; no sweep yet", "")]),
        (PrincipalFacts(count=1, findings=("a", "b")), (), [(WARNING, "a", ""), (WARNING, "b", "")]),
    ],
)
def test_principals(
    principals: PrincipalFacts, zygotes: tuple[ZygoteStatus, ...], expected: list[tuple[CheckOutcome, str, str]]
) -> None:
    facts = MachineFacts(principals=principals, agent=AgentFacts(pid=1, python=PYTHON, zygotes=zygotes))
    assert [(each.outcome, each.sentence, each.mend) for each in found("principals", facts)] == expected


def test_how_the_last_run_started() -> None:
    cold = RunsFacts(last_run="01a", warm_reason="first run with this interpreter")
    assert one("last-start", MachineFacts(runs=cold))[1] == golden("doctor.doctor_machine.run-01a-started")
    assert one("last-start", MachineFacts(runs=RunsFacts(last_run="01a", warm=True)))[1] == golden(
        "doctor.doctor_machine.run-01a-started-warm"
    )
    assert one("last-start", MachineFacts(runs=RunsFacts()))[1] == "no run yet"
