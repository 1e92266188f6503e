"""The rendezvous port: kept from everyone but rank 0, and refused in words.

In processes of their own: a reserved port is bound on every address, which the guard of these tests refuses here.
"""

from __future__ import annotations

from tests.support.golden import golden
from tests.support.node.rank_process import run_script

PREAMBLE = """
import socket
from serverless_gpu.node.base.network import NoPort, reserve_port

def number(sock):
    return sock.getsockname()[1]

def attempt(port, *, reuse, family=socket.AF_INET6, address="::"):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if reuse:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen()
        except OSError as error:
            return error.strerror
        return "listens"
"""


def test_F13_only_who_knows_the_trick_may_listen_on_a_reserved_port() -> None:
    code = """
reserved = reserve_port()
port = number(reserved)
for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET, "127.0.0.1")):
    print(attempt(port, reuse=False, family=family, address=address))
    print(attempt(port, reuse=True, family=family, address=address))
"""
    assert run_script(PREAMBLE + code).splitlines() == ["Address already in use", "listens"] * 3


def test_F13_rank_0_listens_while_the_port_is_reserved_and_is_reached() -> None:
    code = """
reserved = reserve_port()
store = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
store.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
store.bind(("::", number(reserved)))
store.listen()
with socket.create_connection(("127.0.0.1", number(reserved))) as peer, store.accept()[0] as ours:
    peer.sendall(b"met")
    print(ours.recv(3))
"""
    assert run_script(PREAMBLE + code) == "b'met'\n"


def test_F13_a_port_nobody_listens_on_refuses_at_once() -> None:
    code = """
try:
    socket.create_connection(("127.0.0.1", number(reserve_port())))
except ConnectionRefusedError:
    print("refused")
"""
    assert run_script(PREAMBLE + code) == "refused\n"


def test_F13_the_kernel_gives_a_reserved_port_to_nobody_who_lets_it_choose() -> None:
    code = """
reserved = [reserve_port() for _ in range(200)]
print(len({number(sock) for sock in reserved}))
"""
    assert run_script(PREAMBLE + code) == "200\n"


def test_F13_a_taken_port_is_passed_over() -> None:
    code = """
taken = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
taken.bind(("::", 0))
taken.listen()
print(number(reserve_port([number(taken), 0])) != number(taken))
"""
    assert run_script(PREAMBLE + code) == "True\n"


def test_F13_when_every_port_is_taken_the_message_names_them() -> None:
    code = """
taken = [socket.socket(socket.AF_INET6, socket.SOCK_STREAM) for _ in range(5)]
for sock in taken:
    sock.bind(("::", 0))
    sock.listen()
ports = [number(sock) for sock in taken]
try:
    reserve_port(ports)
except NoPort as error:
    listed = ", ".join(f"{port} (Address already in use)" for port in ports)
    print(str(error) == f"no rendezvous port could be reserved: {listed}")
try:
    reserve_port([])
except NoPort as error:
    print(error)
"""
    assert run_script(PREAMBLE + code) == golden("node.rendezvous.true-rendezvous-port")


def test_F13_a_closed_reservation_gives_the_port_up() -> None:
    code = """
reserved = reserve_port()
port = number(reserved)
reserved.close()
print(attempt(port, reuse=False))
"""
    assert run_script(PREAMBLE + code) == "listens\n"
