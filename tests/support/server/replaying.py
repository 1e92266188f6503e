"""A recorded conversation, said again to the server of today: whether a node and a client of then would be served.

    recording.py ─▶ recorded/protocol-<n>.json ─▶ Replay ─▶ server

Requests go out as they were, in their order; what the server of today makes up itself (the node's identifier, the
numbers of orders, tokens) takes the place of what the one of then had made up. An answer serves if it has the status of
then, and everything that was in the one of then, as the same kind of JSON: a peer of then reads what it knows, and
nothing else. Streams are read beside that, as far as they go.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import queue
import socket
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from serverless_gpu.wire.base import API

RECORDED = Path(__file__).parent / "recorded"
_WAIT_S = 60.0

Exchange = dict[str, Any]


def conversation(protocol: int) -> list[Exchange]:
    """Return what was recorded of a protocol."""
    said = json.loads((RECORDED / f"protocol-{protocol}.json").read_text(encoding="utf-8"))
    assert said["protocol"] == protocol
    exchanges: list[Exchange] = said["exchanges"]
    return exchanges


def lacks(then: Any, now: Any, place: str = "") -> list[str]:
    """Return where an answer of today has not what the one of then had, as a path and a few words."""
    if then is None or (now is None and not isinstance(then, dict | list)):
        return []
    if isinstance(then, dict):
        if not isinstance(now, dict):
            return [f"{place}: an object then, {now!r} now"]
        missing = [f"{place}.{key}: not there" for key in then if key not in now]
        return missing + [word for key in then if key in now for word in lacks(then[key], now[key], f"{place}.{key}")]
    if isinstance(then, list):
        if not isinstance(now, list):
            return [f"{place}: a list then, {now!r} now"]
        return lacks(then[0], now[0], f"{place}[0]") if then and now else []
    kinds = (float, int) if type(then) in (float, int) else type(then)
    return [] if isinstance(now, kinds) else [f"{place}: {then!r} then, {now!r} now"]


class _Stream:
    """A stream that is read beside everything else; `events` has what came, and None at its end."""

    def __init__(self, answer: http.client.HTTPResponse, sock: socket.socket) -> None:
        self.events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._answer, self._sock = answer, sock
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for line in self._answer:
                if line.startswith(b"data:"):
                    self.events.put(json.loads(line[5:]))
        except (OSError, ValueError, http.client.HTTPException, AttributeError):
            pass  # its server was stopped
        self.events.put(None)
        self._answer.close()
        self._sock.close()

    def next(self) -> dict[str, Any] | None:
        """Return the next event, or None at the end."""
        return self.events.get(timeout=_WAIT_S)

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(_WAIT_S)


class Replay:
    """The node and the client of then.

    Args:
        protocol: what they speak.
        url: of the server of today.
        tokens: by ``client`` and ``node``.

    Attributes:
        problems: what would not have served them.
        told: what each client's stream said, by the path that asked for it and the run.
    """

    def __init__(self, protocol: int, url: str, tokens: dict[str, str]) -> None:
        self.problems: list[str] = []
        self.told: dict[str, list[dict[str, Any]]] = {}
        self.node = ""
        self._protocol = protocol
        self._url = url
        self._tokens = tokens
        self._attempt_tokens: dict[str, str] = {}
        self._seqs: dict[int, int] = {}
        self._node_then = ""
        self._orders: _Stream | None = None
        self._orders_path = ""
        self._hello: dict[str, Any] = {}
        self._streams: dict[str, _Stream] = {}

    def say(self, exchanges: list[Exchange], *, until: Callable[[Exchange], bool] = lambda _: False) -> list[Exchange]:
        """Say them in their order; stop after one, and return those that follow."""
        for place, exchange in enumerate(exchanges):
            if "event" in exchange:
                self._expect(exchange)
            else:
                self._ask(exchange)
            if until(exchange):
                return exchanges[place + 1 :]
        return []

    def come_again(self, url: str, attempts: list[dict[str, Any]]) -> None:
        """Introduce the node to a server that was started again, as it does after its stream has broken."""
        self._url = url
        self._say("POST", "/agents", {**self._hello, "attempts": attempts}, who="node")
        self._open_orders()

    def hear_out(self) -> None:
        """Read the clients' streams to their ends."""
        for run_id, stream in self._streams.items():
            while (event := stream.next()) is not None:
                self.told.setdefault(run_id, []).append(event)

    def ask_as(self, who: str, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Send one request of one's own; return status and answer."""
        return self._say(method, path, body, who=who)

    def watch(self, run_id: str) -> None:
        """Watch a run anew, as a client does whose server was started again."""
        sock, answer = self._send("GET", f"/runs/{run_id}/events?after=0&offsets=", None, who="client", stream=True)
        assert answer.status == 200
        self._streams[run_id] = _Stream(answer, sock)

    def close(self) -> None:
        """Hang up."""
        for stream in (*self._streams.values(), *([self._orders] if self._orders else [])):
            stream.close()

    # --- below ---------------------------------------------------------------------------------------------------

    def _ask(self, exchange: Exchange) -> None:
        path, body, who = exchange["path"], exchange.get("body"), exchange["who"]
        if exchange.get("stream"):
            self._open(exchange)
            return
        if path == "/agents":
            self._hello = body or {}
        status, answer = self._say(exchange["method"], path, body, who=who, whole=exchange["status"] != 206)
        if path == "/agents":
            self._node_then, self.node = exchange["answer"]["node"], answer["node"]
        name = f"{exchange['method']} {path}"
        if status != exchange["status"]:
            self.problems.append(f"{name}: {exchange['status']} then, {status} now: {answer}")
        elif "packed" in (exchange.get("answer") or {}):
            if answer != _unpacked(exchange["answer"]):
                self.problems.append(f"{name}: other bytes than then")
        else:
            self.problems += [f"{name}: {word}" for word in lacks(exchange.get("answer"), answer)]

    def _open(self, exchange: Exchange) -> None:
        path, body = exchange["path"], exchange.get("body")
        if exchange["who"] == "node":
            self._orders_path = path
            self._open_orders()
            return
        sock, answer = self._send(exchange["method"], path, body, who="client", stream=True)
        if answer.status != exchange["status"]:
            self.problems.append(f"{path}: {exchange['status']} then, {answer.status} now: {answer.read()!r}")
            return
        run_id = body["id"] if body else path.split("/")[2]
        self._streams[run_id] = _Stream(answer, sock)

    def _open_orders(self) -> None:
        sock, answer = self._send("GET", self._orders_path, None, who="node", stream=True)
        assert answer.status == 200, answer.read()
        self._orders = _Stream(answer, sock)

    def _expect(self, exchange: Exchange) -> None:
        """Wait for an order that came then; what clients are told is looked at in the end."""
        if not exchange["event_of"].startswith("/agents/"):
            return
        then = exchange["event"]
        assert self._orders is not None
        now = self._orders.next()
        assert now is not None, "the stream of orders has ended"
        named = ("type", "run_id", "fence")
        if [now.get(name) for name in named] != [then[name] for name in named]:
            self.problems.append(f"order {then['type']} of {then['run_id']} then, {now} now")
        self.problems += [f"order {then['type']}: {word}" for word in lacks(then, now)]
        self._seqs[then["seq"]] = now["seq"]
        if "token" in now:
            self._attempt_tokens[f"{now['run_id']}/{now['fence']}"] = now["token"]

    def _say(self, method: str, path: str, body: Any, *, who: str, whole: bool = True) -> tuple[int, Any]:
        sock, answer = self._send(method, path, body, who=who, whole=whole)
        content = answer.read()
        answer.close()
        sock.close()
        if answer.headers.get("Content-Type", "").startswith("application/json"):
            return answer.status, json.loads(content)
        return answer.status, content or None

    def _send(
        self, method: str, path: str, body: Any, *, who: str, stream: bool = False, whole: bool = True
    ) -> tuple[socket.socket, http.client.HTTPResponse]:
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_WAIT_S)
        headers = {
            "Authorization": f"Bearer {self._token(who, path)}",
            "User-Agent": "serverless-gpu/0.1.0",
            "SGPU-Protocol": str(self._protocol),
            **({"Accept": "text/event-stream"} if stream else {}),
            **({} if whole else {"Range": "bytes=0-"}),
        }
        data: bytes | None = None
        if isinstance(body, dict) and "packed" in body:
            data, headers["Content-Type"] = _unpacked(body), "application/octet-stream"
        elif body is not None:
            if "seqs" in body:
                body = {"seqs": [self._seqs[seq] for seq in body["seqs"]]}
            data, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
        path = path.replace(self._node_then, self.node) if self._node_then else path
        connection.request(method, API + path, body=data, headers=headers)
        sock: socket.socket = connection.sock  # the connection forgets it when the answer is to be its last
        return sock, connection.getresponse()

    def _token(self, who: str, path: str) -> str:
        if who != "attempt":
            return self._tokens[who]
        if path.startswith("/attempts/"):
            _, _, run_id, fence, *_ = path.split("/")
            return self._attempt_tokens[f"{run_id}/{fence}"]
        return list(self._attempt_tokens.values())[-1]


def _unpacked(body: dict[str, str]) -> bytes:
    return zlib.decompress(base64.b85decode(body["packed"]))
