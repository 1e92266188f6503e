"""As a program: become somebody else, hide directories behind an empty one, and go on as another program.

    python elsewhere.py '{"hidden": [...], "empty": "...", "uid": 65534}' program argument...

Root becomes another user; everybody else keeps their rights and is seen under another number, in a user namespace.
What is mounted here is seen by this process and what it starts, and ends with them. Standard library only.
"""

import ctypes
import json
import os
import sys

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000


def main() -> None:
    """Do it, and never return."""
    plan = json.loads(sys.argv[1])
    program = sys.argv[2:]
    # The program may start with its whole name below a directory that is hidden now; it must not.
    libc = ctypes.CDLL(None, use_errno=True)
    uid, is_root = plan["uid"], os.geteuid() == 0
    if is_root:
        check(libc.unshare(CLONE_NEWNS), "unshare")
    else:
        own = os.geteuid(), os.getegid()
        check(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {own[0]} 1"), ("gid_map", f"{uid} {own[1]} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount /")
    for directory in plan["hidden"]:
        at = os.fsencode(directory)
        check(libc.mount(os.fsencode(plan["empty"]), at, None, MS_BIND, None), f"mount {directory}")
    os.chdir("/")
    if is_root:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    os.execv(program[0], program)


def check(result: int, what: str) -> None:
    """Raise what a system call says."""
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


if __name__ == "__main__":
    main()
