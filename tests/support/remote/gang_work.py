"""What ranks of gangs run in these tests; it travels to the nodes as a file of the caller's project.

Standard library only; torch is taken from where the test has it: its capture would take longer than the tests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

_STAY_S = 100.0


def rank_number() -> int:
    """Return this rank's number."""
    return int(os.environ["RANK"])


def announce(where: str, name: str) -> None:
    """Leave a file that says this process's pid and its parent's; it is whole as soon as it is there."""
    temporary = Path(where, f".{name}.{os.getpid()}")
    temporary.write_text(f"{os.getpid()} {os.getppid()}")
    temporary.rename(Path(where, name))


def wait_for_file(where: str, name: str) -> None:
    """Wait until a file is there, not for ever."""
    limit = time.monotonic() + _STAY_S
    while not Path(where, name).exists():
        if time.monotonic() > limit:
            raise TimeoutError(f"{name} did not come")
        time.sleep(0.01)


def stay(where: str) -> int:
    """Say that this rank is there, and return its number once the file `go` is."""
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    wait_for_file(where, "go")
    print(f"rank {rank_number()} goes", flush=True)
    return rank_number()


def fail_in_the_last(where: str, told: str = "") -> None:
    """Fail in the last rank once all are there, and a file that was named; the others wait."""
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    last = int(os.environ["WORLD_SIZE"]) - 1
    if rank_number() == last:
        for rank in range(last):
            wait_for_file(where, f"{os.environ['SGPU_FENCE']}.rank{rank}")
        if told:
            wait_for_file(where, told)
        raise ValueError(f"no luck in rank {last}")
    wait_for_file(where, "go")


def die_in_the_last(where: str) -> None:
    """Have the last rank die of SIGSEGV once all are there; the others wait."""
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    last = int(os.environ["WORLD_SIZE"]) - 1
    if rank_number() == last:
        for rank in range(last):
            wait_for_file(where, f"{os.environ['SGPU_FENCE']}.rank{rank}")
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    wait_for_file(where, "go")


def talk(where: str) -> None:
    """Print numbers, each once its file is there."""
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    for number in range(1000):
        wait_for_file(where, f"go{number}")
        print(f"line {number}", flush=True)


def lose_a_peer(where: str) -> None:
    """Have rank 0 hear, once the file `go` is there, that another one is gone; the others wait."""
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    wait_for_file(where, "go" if rank_number() == 0 else "never")
    raise ConnectionResetError("Connection reset by peer, of rank 2")


def add_up(site: str) -> tuple[int, int, str]:
    """Add all ranks' numbers with gloo; return this rank's, the sum and its node's."""
    sys.path.append(site)
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    number = torch.tensor([rank_number()])
    dist.all_reduce(number)
    dist.barrier()
    dist.destroy_process_group()
    return rank_number(), int(number.item()), os.environ["NODE_RANK"]


def add_up_by_sockets() -> tuple[int, int]:
    """Add all ranks' numbers at rank 0's rendezvous address, without torch; return the sum and this rank's uid."""
    place, others = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["WORLD_SIZE"]) - 1
    if rank_number():
        deadline = time.monotonic() + _STAY_S
        while True:
            try:
                with socket.create_connection(place) as peer:
                    peer.sendall(bytes([rank_number()]))
                    return peer.recv(1)[0], os.getuid()
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
    with contextlib.ExitStack() as peers, socket.create_server(place) as listener:
        found = [peers.enter_context(listener.accept()[0]) for _ in range(others)]
        total = sum(peer.recv(1)[0] for peer in found)
        for peer in found:
            peer.sendall(bytes([total]))
    return total, os.getuid()


def reached_places(*places: str) -> list[str]:
    """Return the places (ADDRESS:PORT) that accept a connection of this rank."""
    found = []
    for each in places:
        address, _, port = each.rpartition(":")
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((address, int(port)), timeout=10):
            found.append(each)
    return found


def add_up_until_one_dies(site: str) -> None:
    """Add up with gloo; the last rank dies of it, and the others are told by their sockets only."""
    sys.path.append(site)
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    number = torch.tensor([rank_number()])
    dist.all_reduce(number)
    if rank_number() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.all_reduce(number)


def place() -> tuple[int, ...]:
    """Return where this rank is told that it is."""
    names = ("RANK", "NODE_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NUM_NODES", "WORLD_SIZE")
    return tuple(int(os.environ[name]) for name in names)


def add_up_for_ever(site: str, where: str) -> None:
    """Add up with gloo, again and again; say that it goes on."""
    sys.path.append(site)
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    announce(where, f"{os.environ['SGPU_FENCE']}.rank{rank_number()}")
    while True:
        dist.all_reduce(number)
        time.sleep(0.05)


def wait_for_the_last(where: str, site: str) -> None:
    """Wait in a collective for the last rank, which never comes: it waits for a file."""
    sys.path.append(site)
    import torch  # noqa: PLC0415 - in ranks only
    import torch.distributed as dist  # noqa: PLC0415 - likewise

    dist.init_process_group("gloo")
    if rank_number() == dist.get_world_size() - 1:
        wait_for_file(where, "go")
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


def save_when_told(where: str) -> None:
    """Work until the run is to stop, and write down what for."""
    from serverless_gpu import runtime  # noqa: PLC0415 - in ranks only

    runtime.should_stop()
    while not runtime.should_stop():
        time.sleep(0.01)
    Path(where, f"saved{rank_number()}").write_text(str(runtime.stop_reason()))


def save_and_go_on(where: str) -> str:
    """Save something in the first attempt, and stay until it is stopped; return which one the next goes on from."""
    from serverless_gpu import runtime  # noqa: PLC0415 - in ranks only

    earlier = runtime.resume_dir()
    if earlier is not None or os.environ["SGPU_FENCE"] != "1":
        time.sleep(2)  # two samples
        return earlier.name if earlier is not None else "nothing"
    Path(runtime.checkpoint_dir(), f"rank{rank_number()}").touch()
    runtime.should_stop()
    announce(where, f"1.rank{rank_number()}")
    while not runtime.should_stop():
        time.sleep(0.01)
    return "stopped"
