"""What a server was told of Ray: whether it makes one pool of several machines, and where.

engine = "ray"                            a head of our own on this machine, at `ray_port` and the ports after it
ray_address + ray_token_file              a cluster that is there already; this machine and others join it
node_address                              of this machine, for the others
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serverless_gpu.engines.ray.start_arguments import check_node_address, ports
from serverless_gpu.errors import InvalidValue


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How Ray makes one pool.

    Attributes:
        port: the first of this machine's ports.
        node_address: at which other machines reach this one; "" to find that out.
        address: of a cluster that is there already; "" for one of our own.
        token_file: path of the file with that one's token.
    """

    port: int
    node_address: str = ""
    address: str = ""
    token_file: str = ""


class Wrong(Exception):  # not one that anybody but `settings.py` sees
    """A setting that cannot be.

    Attributes:
        name: of the setting.
        text: what is wrong.
        hint: what to do.
    """

    def __init__(self, name: str, text: str, hint: str) -> None:
        super().__init__(text)
        self.name, self.text, self.hint = name, text, hint


def ray_settings(engine: str, *, port: int, node_address: str, address: str, token_file: str) -> RaySettings | None:
    """Return what was said of Ray; None where it is not used.

    Raises:
        Wrong: one of the settings cannot be.
    """
    if engine != "ray":
        for name, said in (("ray_address", address), ("ray_token_file", token_file), ("node_address", node_address)):
            if said:
                raise Wrong(name, f"{name} comes without engine = 'ray'", "sgpu up --engine ray")
        return None
    _checked("ray_port", lambda: ports(port))
    if node_address:
        _checked("node_address", lambda: check_node_address(node_address))
    if bool(address) != bool(token_file):
        there, lacks = ("ray_address", "ray_token_file") if address else ("ray_token_file", "ray_address")
        raise Wrong(there, f"{there} comes without {lacks}", "a cluster that is there has an address and a token")
    if address:
        host, _, number = address.rpartition(":")
        if not host or not number.isdigit() or not 0 < int(number) < 65_536:
            raise Wrong("ray_address", f"ray_address is {address!r}", "an address and a port: 10.0.0.5:6379")
    return RaySettings(port=port, node_address=node_address, address=address, token_file=token_file)


def _checked(name: str, check: Callable[[], object]) -> None:
    try:
        check()
    except InvalidValue as error:
        raise Wrong(name, f"{name}: {error.message}", error.hint) from None
