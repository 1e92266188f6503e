"""A sandbox in which attempts of the canary run, without agent and server, and from which a test removes measures.

The sandbox is the product's: `sandbox.enter`, `fork_init` and `enter_attempt` of `node/inside/sandbox.py`. A removal is
Python source that replaces a function of the product in the launcher's process. No setting reaches it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Literal, NamedTuple

from serverless_gpu.model.canary import Trial
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.canary.examination import new_key, trials, with_remains
from serverless_gpu.node.canary.inspection import marked
from serverless_gpu.node.canary.runs import json_lines
from serverless_gpu.node.canary.targets import new_mark, prepared
from serverless_gpu.node.inside.canary import victim
from serverless_gpu.node.inside.sandbox import View
from serverless_gpu.node.processes.spawn import PACKAGE, load_inside
from tests.support.local.observe import wait_for

UID = 1_899_960_000  # Outside of the default range, to which network rules of other tests apply.
_ENDED_S = 60.0
_TMPFS_BYTES = 1 << 20
_PROGRAM = """\
import encodings.ascii, encodings.idna, json, os, sys
from _sgpu_inside import linux, mounts, sandbox, seal
from _sgpu_inside.canary import runner

place, view, targets = {place!r}, sandbox.View(**{view!r}), json.loads({targets!r})
set_dumpable = seal.set_dumpable

def in_root(path):
    "Show a directory of the machine in the private root, in place of the private one."
    pivot = mounts.pivot_root
    def show(root):
        mounts.attach(mounts.clone_tree(path, mounts.NO_SETUID), root + path)
        pivot(root)
    mounts.pivot_root = show

def without_mount(*places):
    "Leave out mounts of an attempt."
    mount = mounts.mount
    mounts.mount = lambda kind, at, flags, options="": None if at in places else mount(kind, at, flags, options)

{removal}

def attempt():
    runner.run(targets, targets["only"])

if place == "account":
    os.setgroups([])
    seal.leave_keyring()
    os.setresgid(view.uid, view.uid, view.uid)
    seal.forbid_new_privileges()
    os.setresuid(view.uid, view.uid, view.uid)
    attempt()
    os._exit(0)
sandbox.enter(view, ())
set_dumpable(value=True)  # As after the start of the zygote's interpreter.
if place == "zygote":
    attempt()
    os._exit(0)
pid = sandbox.fork_init()
if pid == 0:
    linux.set_name("sgpu-stem")
    sandbox.enter_attempt({tmpfs_bytes}, {tmpfs_bytes}, ())
    rank = os.fork()
    if rank == 0:
        linux.set_name("sgpu-rank")
        set_dumpable(value=True)
        attempt()
        os._exit(0)
    os.waitpid(rank, 0)
    os._exit(0)
sandbox._exit_like(pid)
"""

# Another uid cannot start this interpreter if it lies below root's home, so the victim changes its uid itself.
_VICTIM = """\
import encodings.ascii, os, sys
from _sgpu_inside.canary import victim
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
victim.main(sys.argv[1])
"""

Place = Literal["rank", "zygote", "account"]
"""Position of the attempts: a rank, the code of a zygote, or a process that only has a uid of its own."""


class Ended(NamedTuple):
    """The outcomes of attempts by name, and the error output of a sandbox that did not start."""

    outcomes: dict[str, Trial]
    errors: str

    @property
    def possible(self) -> set[str]:
        """Return the names of the attempts that succeeded."""
        return {name for name, trial in self.outcomes.items() if trial.outcome == "possible"}


@contextmanager
def targets_of_a_victim(home: Path) -> Iterator[dict[str, object]]:
    """Yield targets of this machine, and a victim with the uid of the sandbox, as another run of its principal."""
    mark = new_mark()
    with (
        tempfile.TemporaryDirectory(prefix="sg-victim-", dir="/var/tmp") as own,
        prepared(Home(home), {}, mark) as found,
    ):
        Path(own).chmod(0o777)
        command = [sys.executable, "-I", "-S", "-c", load_inside() + _VICTIM.format(uid=UID), f"{mark}-victim"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={"HOME": own}, cwd="/") as other:
            try:
                assert other.stdout is not None
                port = json_lines(other.stdout.readline().decode())[0]["port"]
                wait_for(lambda: marked(f"{mark}-victim"), "the victim runs")
                yield {
                    **found,
                    "victim_pid": other.pid,
                    "victim_name": victim.NAME,
                    "victim_uid": UID + 1,
                    "victim_port": f"127.0.0.1:{port}",
                }
            finally:
                other.terminate()


def attempt_in_sandbox(
    targets: Mapping[str, object],
    names: Sequence[str],
    *,
    removal: str = "",
    uid: int = UID,
    place: Place = "rank",
) -> Ended:
    """Run attempts in a sandbox without the removed measures, and return their outcomes."""
    mark, key = f"{new_mark()}-run", new_key()
    with tempfile.TemporaryDirectory(prefix="sg-sandbox-", dir="/var/tmp") as parent:
        at, home = Path(parent, "root"), Path(parent, "home")
        for each in (at, home):
            each.mkdir()
        home.chmod(0o777)
        view = View(uid=uid, at=str(at), home=str(home), python=sys.executable, shown=[str(PACKAGE)], devices=[])
        program = load_inside() + _PROGRAM.format(
            place=place,
            view=view._asdict(),
            targets=dumps({**targets, "mark": mark, "left_key": key, "only": list(names)}),
            removal=removal,
            tmpfs_bytes=_TMPFS_BYTES,
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={},
            timeout=_ENDED_S,
            check=False,
        )
    found = with_remains(trials(json_lines(done.stdout.decode())), mark, key)
    return Ended(found, done.stderr.decode())
