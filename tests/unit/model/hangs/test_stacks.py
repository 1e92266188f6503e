"""Stacks as faulthandler wrote them in real ranks (gloo, DDP, data loaders, sockets), and where they stand.

Captured with Python 3.11 and torch 2.13; only the paths were shortened.
"""

from __future__ import annotations

import faulthandler
import threading
from pathlib import Path

import pytest

from serverless_gpu.model.hangs.stacks import (
    Stack,
    at_socket,
    delegates,
    in_backward,
    in_collective,
    is_whole,
    parse,
    readable,
    uses_torch,
)
from tests.support.golden import golden
from tests.support.model.stacks import (
    ACCEPT,
    ALL_REDUCE,
    BACKWARD,
    BARRIER,
    CHILD,
    EVENT,
    LOADER,
    OWN,
    SLEEP,
    STANDARD,
    TORCH,
    USER,
    USERS_FORWARD,
    WRAPPER,
    frames,
)

ZYGOTE = f"""\
  File "{OWN}rank.py", line 149 in execute
  File "{OWN}rank.py", line 101 in main
  File "{OWN}stem.py", line 170 in _become_rank
  File "{OWN}zygote.py", line 90 in main
  File "<string>", line 6 in <module>
"""


def dump(*calls: tuple[str, int, str], before: str = "") -> str:
    """Return what a rank writes whose main thread is in these calls of user code."""
    lines = "".join(f'  File "{file}", line {line} in {function}\n' for file, line, function in calls)
    return f"{before}Current thread 0x00007f84c00a7b80 (most recent call first):\n{lines}{ZYGOTE}"


OBJECTS = (
    (f"{TORCH}/distributed/distributed_c10d.py", 3151, "broadcast"),
    WRAPPER,
    (f"{TORCH}/distributed/distributed_c10d.py", 4026, "broadcast_object_list"),
    WRAPPER,
    USER,
)
RENDEZVOUS = (
    (f"{TORCH}/distributed/rendezvous.py", 198, "_create_c10d_store"),
    (f"{TORCH}/distributed/rendezvous.py", 278, "_env_rendezvous_handler"),
    USER,
)
SYNC_BUFFERS = (
    (f"{TORCH}/nn/parallel/distributed.py", 2198, "_distributed_broadcast_coalesced"),
    (f"{TORCH}/nn/parallel/distributed.py", 1661, "forward"),
    (f"{TORCH}/nn/modules/module.py", 1773, "_call_impl"),
    USER,
)
PACKAGES_FORWARD = (
    ("/venv/lib/python3.11/site-packages/transformers/models/llama.py", 9, "forward"),
    *USERS_FORWARD[1:],
)
CHECKPOINT = (
    (f"{STANDARD}/zipfile.py", 9, "read"),
    (f"{TORCH}/distributed/checkpoint/filesystem.py", 500, "read_data"),
    (f"{TORCH}/distributed/checkpoint/state_dict_loader.py", 100, "load"),
    USER,
)
CHECKPOINT_BARRIER = (ALL_REDUCE[0], WRAPPER, *CHECKPOINT[1:])
ASYNCIO = ((f"{STANDARD}/selectors.py", 468, "select"), (f"{STANDARD}/asyncio/base_events.py", 1884, "_run_once"), USER)
DOWNLOAD = ((f"{STANDARD}/ssl.py", 1, "read"), (f"{STANDARD}/urllib/request.py", 5, "urlopen"), *USERS_FORWARD)
NOTHING: tuple[tuple[str, int, str], ...] = ()

PLACES = {
    "all_reduce": (ALL_REDUCE, {"collective", "torch"}),
    "barrier": (BARRIER, {"collective", "torch"}),
    "broadcast_object_list": (OBJECTS, {"collective", "torch"}),
    "init_process_group": (RENDEZVOUS, {"collective", "torch"}),
    "DDP's own forward": (SYNC_BUFFERS, {"collective", "torch"}),
    "DDP backward": (BACKWARD, {"backward", "torch"}),
    "a forward under FSDP and DDP": (USERS_FORWARD, set()),
    "a package's forward under FSDP": (PACKAGES_FORWARD, {"torch"}),
    "reading a distributed checkpoint": (CHECKPOINT, {"torch"}),
    "a barrier while reading one": (CHECKPOINT_BARRIER, {"collective", "torch"}),
    "DataLoader": (LOADER, {"socket", "delegates", "torch"}),
    "time.sleep": (SLEEP, set()),
    "socket.accept": (ACCEPT, {"socket"}),
    "a download under FSDP": (DOWNLOAD, {"socket"}),
    "Event.wait": (EVENT, {"delegates"}),
    "subprocess.run": (CHILD, {"delegates"}),
    "asyncio": (ASYNCIO, {"socket", "delegates"}),
    "nothing": (NOTHING, set()),
}


@pytest.mark.parametrize(("calls", "expected"), PLACES.values(), ids=PLACES)
def test_where_a_stack_stands(calls: tuple[tuple[str, int, str], ...], expected: set[str]) -> None:
    made = frames(*calls)
    asked = {
        "collective": in_collective,
        "backward": in_backward,
        "socket": at_socket,
        "delegates": delegates,
        "torch": uses_torch,
    }
    assert {name for name, question in asked.items() if question(made)} == expected


def test_frames_of_our_runtime_are_left_out() -> None:
    stack = parse(dump(*ALL_REDUCE), OWN)
    assert (stack.frames, stack.others) == (frames(*ALL_REDUCE), ())
    assert stack.main is not None and stack.main.current
    assert stack.main.body().endswith('  File "/home/me/train.py", line 30 in train')
    assert stack.where() == "train.py:30 train"


def test_a_rank_whose_function_has_ended_keeps_ours() -> None:
    stack = parse(dump(), OWN)
    assert stack.where() == "rank.py:149 execute" and len(stack.frames) == 4


def test_other_threads_are_apart_and_the_main_thread_is_the_last() -> None:
    feeder = (
        "Thread 0x00007f66ce5ff6c0 (most recent call first):\n"
        f'  File "{STANDARD}/threading.py", line 327 in wait\n'
        f'  File "{STANDARD}/threading.py", line 1002 in _bootstrap\n\n'
    )
    stack = parse(dump(*LOADER, before=feeder), OWN)
    assert stack.frames == frames(*LOADER)
    assert [thread.title for thread in stack.others] == [golden("model.stacks.thread-0x00007f66ce5ff6c0-most")]
    assert [frame.function for frame in stack.others[0].frames] == ["wait", "_bootstrap"]
    assert not stack.others[0].current


def test_a_main_thread_that_blocks_signals_is_still_the_last() -> None:
    text = dump(USER, before='Current thread 0x2 [pool] (most recent call first):\n  File "/p.py", line 1 in work\n\n')
    text = text.replace("Current thread 0x00007f84c00a7b80", "Thread 0x00007f84c00a7b80 [main]")
    stack = parse(text, OWN)
    assert stack.frames == frames(USER) and stack.others[0].current


def test_a_crash_is_read_by_the_same_rule() -> None:
    calls = (("<string>", 2, "made_by_exec"), ("<string>", 9, "<module>"), USER)
    feeder = f'Thread 0x2 (most recent call first):\n  File "{STANDARD}/threading.py", line 327 in wait\n\n'
    head = f"Fatal Python error: Segmentation fault\n\n{feeder}"
    text = readable(f"{dump(*calls, before=head)}\nExtension modules: numpy (total: 1)\n", OWN)
    lines = [f'  File "{file}", line {line} in {function}' for file, line, function in calls]
    title = "Current thread 0x00007f84c00a7b80 (most recent call first):"
    assert text == "\n".join([*head.splitlines(), title, *lines])
    assert parse(text, OWN) == parse(dump(*calls, before=head), OWN)
    assert readable("", OWN) == "" and readable("cut\n", OWN) == "cut"


def test_more_threads_than_faulthandler_writes() -> None:
    many = "".join(f'Thread 0x{n:x} (most recent call first):\n  File "/p.py", line {n} in work\n\n' for n in range(98))
    current = 'Current thread 0xff (most recent call first):\n  File "/home/me/train.py", line 30 in train\n\n'
    assert parse(many + current + many + "...\n", OWN).frames == frames(USER)
    lost = parse(many + "...\n", OWN)
    assert (lost.main, lost.frames, lost.where(), len(lost.others)) == (None, (), "", 98)


def test_a_place_without_user_code_is_the_innermost() -> None:
    assert Stack(None).where() == ""
    assert parse(dump(ALL_REDUCE[0]), OWN).where() == "distributed_c10d.py:3252 all_reduce"
    assert parse(dump(("<frozen importlib._bootstrap>", 7, "_load"), USER), OWN).where() == "train.py:30 train"
    assert parse(dump(("<string>", 2, "made_by_exec"), USER), OWN).where() == "<string>:2 made_by_exec"
    assert parse(dump(("/tmp/ipykernel_7/1234.py", 3, "<module>")), OWN).where() == "1234.py:3 <module>"


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (dump(*ALL_REDUCE), True),
        (dump(*ALL_REDUCE)[:-1], False),
        (dump(*ALL_REDUCE).rpartition("  File")[0], False),
        (dump(*ALL_REDUCE)[:80], False),
        ('Thread 0x1 (most recent call first):\n  File "/p.py", line 1 in work\n\n...\n', True),
        ('Current thread 0x1 (most recent call first):\n  File "/p.py", line 1 in work\n  ...\n', True),
        ("", False),
        ("\n", False),
    ],
    ids=["whole", "last newline missing", "last frame missing", "cut", "many threads", "deep", "empty", "blank"],
)
def test_whether_a_dump_is_finished(text: str, whole: bool) -> None:
    assert is_whole(text) is whole


@pytest.mark.parametrize(
    "text", ["", "\n", "nonsense", '  File "/a.py", line 1 in f', "Thread 0x", 'Thread 0x1\n  File "/a", line x in f']
)
def test_what_is_not_understood_is_no_frame(text: str) -> None:
    assert parse(text, OWN).frames == ()


def test_this_thread_as_it_is_written_here(tmp_path: Path) -> None:
    path = tmp_path / "stack"
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    stack = parse(path.read_text(), OWN)
    here = next(frame for frame in stack.frames if frame.function == "test_this_thread_as_it_is_written_here")
    assert here.file.endswith("test_stacks.py") and threading.current_thread() is threading.main_thread()
