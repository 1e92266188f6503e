"""What ranks reach over the network. Standard library only: this file travels to the nodes."""

from __future__ import annotations

import errno
import os
import socket


def reach(*places: str) -> int:
    """Print for each place, such as ``"10.0.0.1:80"``, whether a connection comes about."""
    for place in places:
        host, _, port = place.rpartition(":")
        with socket.socket() as sock:
            sock.settimeout(3)
            try:
                sock.connect((host, int(port)))
                said = "reached"
            except OSError as error:
                said = errno.errorcode.get(error.errno or 0, repr(error))
        print(place, said, flush=True)
    return os.getuid()


def reach_as_gang(*places: str) -> int:
    """Exchange bytes with all ranks at rank 0, as in training, then see what this rank reaches."""
    master, number = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
    others = int(os.environ["WORLD_SIZE"]) - 1
    if number:
        peer = _dialed(master)
        with peer:
            peer.sendall(bytes([number]))
            total = peer.recv(1)[0]
    else:
        with socket.create_server(master) as listener:
            peers = [listener.accept()[0] for _ in range(others)]
        total = sum(peer.recv(1)[0] for peer in peers)
        for peer in peers:
            peer.sendall(bytes([total]))
            peer.close()
    print("sum", total, flush=True)
    return reach(*places)


def _dialed(master: tuple[str, int]) -> socket.socket:
    """Connect to rank 0, which listens a moment later."""
    while True:
        try:
            return socket.create_connection(master, timeout=30)
        except ConnectionRefusedError:
            continue
