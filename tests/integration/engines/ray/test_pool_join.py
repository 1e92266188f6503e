"""What is refused before a machine joins, each in its own words; the rest is in tests/e2e/ray/test_joining.py."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest

from serverless_gpu.engines.ray import pool_join, ray_machine
from serverless_gpu.errors import ServerProblem
from tests.support.golden import golden


def test_an_address_of_another_machine_is_refused() -> None:
    ray_machine.check_own("127.0.0.9")
    # In a process that may bind to anything; nothing is sent.
    program = "from serverless_gpu.engines.ray import ray_machine; ray_machine.check_own('192.0.2.7')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert golden("engines.ray_joining.192-address-machine") in done.stderr
    assert golden("engines.ray_joining.hint-ip-brief") in done.stderr


def test_a_port_that_somebody_has_is_named() -> None:
    base = 21_300
    assert ray_machine.taken_port(base, "127.0.0.9") is None
    for address, offset in (("127.0.0.1", 3), ("127.0.0.9", 1)):
        with socket.create_server((address, base + offset)):
            assert ray_machine.taken_port(base, "127.0.0.9") == base + offset


def test_a_head_that_is_being_started_is_waited_for_and_one_that_is_closed_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        pool_join.refuse_closed(f"127.0.0.1:{port}", patience_s=0.0, ports="7900-7999")
    head = f"127.0.0.1:{port}"
    with pytest.raises(ServerProblem) as closed:
        pool_join.refuse_closed(head, patience_s=0.0, ports="7900-7999")
    assert closed.value.message == golden("engines.ray_joining.server-answers-ray", head=head)
    assert closed.value.hint == golden("engines.ray_joining.between-machines-pool")
    with pytest.raises(ServerProblem) as gone:
        pool_join.refuse_closed(head, patience_s=0.1, ports="7900-7999")
    assert gone.value.message == golden("engines.ray_joining.ray-head-answers", head=head)
    late = threading.Timer(0.3, lambda: served.append(socket.create_server(("127.0.0.1", port))))
    served: list[socket.socket] = []
    late.start()
    pool_join.refuse_closed(head, patience_s=30.0, ports="7900-7999")
    late.join()
    served[0].close()
