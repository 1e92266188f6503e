"""One crew's side of a gang on several nodes: through the server, but for the rendezvous.

A gang on one node has no other crews, and reserves a rendezvous port only.

    devices, stem ─▶ offer ─▶ (offers) ─▶ reach ─▶ (chosen) ─▶ ranks begin          in brackets: what the server says
    all ranks returned ─▶ returned ─▶ (release) ─▶ they may exit
    it stops before its end ─▶ halt, at once                ◀─ (peer_failed): the same, of another one

Messages are sent whole each time, to the present uplink and to a later one; they may arrive twice. Nothing here has a
deadline: the server ends a failed rendezvous, and the lease bounds how long this crew goes on without it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections.abc import Callable

import msgspec

from serverless_gpu.ambient import Clock
from serverless_gpu.model.lifecycle.attempt import Attempt, Event, PeerFailed, Phase, Reason, Released, State
from serverless_gpu.model.lifecycle.gang_lifecycle import Halt
from serverless_gpu.model.lifecycle.rendezvous import SAVED_MAX, Chosen, variables
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.network import NoPort, reserve_port
from serverless_gpu.node.inside.rank import saved_before
from serverless_gpu.node.supervisor.rank_environment import Network
from serverless_gpu.node.supervisor.rendezvous import Rendezvous

_DETAIL_CHARACTERS_MAX = 1_000


class Peers:
    """One crew's dealings with the others."""

    def __init__(
        self,
        launch: protocol.Launch,
        checkpoints: str,
        clock: Clock,
        selector: selectors.BaseSelector,
        tell: Callable[[protocol.Message], None],
    ) -> None:
        # called with the server's news; returns the event that follows from its judgement of all nodes
        self.judge: Callable[[protocol.GangNews], list[Event]] = lambda news: []
        self._launch = launch
        self._checkpoints = f"{checkpoints}/{launch.run_id}/{launch.fence}" if checkpoints else ""
        self._tell = tell
        self._port: socket.socket | None = None
        self._chosen: Chosen | None = None
        self._news = protocol.CrewNews()
        self._meeting: Rendezvous | None = None
        if len(launch.crews) > 1:
            self._meeting = Rendezvous(launch.nonce, launch.crew, len(launch.crews), selector, clock)

    @property
    def news(self) -> protocol.CrewNews | None:
        """Return the news for the others; None without others."""
        return None if self._meeting is None else self._news

    @property
    def are_awaited(self) -> bool:
        """Return whether this crew could begin, and has not met the others yet."""
        return self._news.offer is not None and self._chosen is None

    def met(self) -> bool:
        """Return whether all crews have met (at once on one node); the first call begins the rendezvous.

        Raises NoPort when no port can be reserved, or listened on.
        """
        if self._meeting is None:
            return True
        if self._news.offer is None:
            port = self._reserved() if self._launch.crew == 0 else 0
            saved: tuple[int, ...] = ()  # visible checkpoints: ranks of all nodes go on from the same
            with contextlib.suppress(OSError):
                saved = tuple(saved_before(self._checkpoints))[:SAVED_MAX] if self._checkpoints else ()
            try:
                offer = self._meeting.offer(port)
                self._say(offer=msgspec.structs.replace(offer, saved=saved))
            except OSError as error:
                raise NoPort(
                    f"there is no port on which the run's other nodes could reach this one: {error}"
                ) from error
        return self._chosen is not None

    def network(self) -> Network:
        """Return how ranks reach each other, once all have met; raises NoPort."""
        if self._chosen is None:
            return Network(master=("127.0.0.1", self._reserved()))
        crew = self._launch.crew
        return Network(self._chosen.master, self._chosen.addresses[crew], variables(self._chosen, crew))

    def hear(self, heard: protocol.GangNews) -> list[Event]:
        """Take what the server says; return what follows for this crew."""
        if self._meeting is None:
            return []
        judged = self.judge(heard)  # before what failed: it may be the same, and has more to say
        if heard.peer_failed:
            return [*judged, PeerFailed(heard.peer_failed[:_DETAIL_CHARACTERS_MAX])]
        if heard.offers and self._news.offer is not None and self._news.halt is None:
            self._meeting.try_all(heard.offers)
        chosen, crews = heard.chosen, len(self._launch.crews)
        if chosen is not None and self.are_awaited and len(chosen.interfaces) == len(chosen.addresses) == crews:
            self._chosen = chosen
            self._meeting.close()
        return [*judged, Released()] if heard.release else judged

    def tell(self, **changes: object) -> None:
        """Say something of this crew that others are to be asked about, too: fields of `CrewNews`."""
        if self._meeting is not None:
            self._say(**changes)

    def watch(self, attempt: Attempt) -> None:
        """Report changes of this crew."""
        if self._meeting is None:
            return
        halt = self._news.halt
        if attempt.state is State.STOPPING and halt is None and attempt.reason is not Reason.COMPLETED:
            self._meeting.close()
            halt = _halt(attempt)
        returned = self._news.returned or attempt.phase is Phase.RETURNED
        self._say(halt=halt, returned=returned)

    @property
    def wake_ns(self) -> int | None:
        """Return when `tend` has something to do, or None."""
        return None if self._meeting is None else self._meeting.wake_ns

    def tend(self) -> None:
        """Do what is due."""
        if self._meeting is not None:
            self._meeting.tend()
            self._say(reach=self._meeting.reach)

    def close(self) -> None:
        """Listen no more, and give the rendezvous port up."""
        if self._meeting is not None:
            self._meeting.close()
        if self._port is not None:
            self._port.close()

    def _reserved(self) -> int:
        if self._port is None:
            self._port = reserve_port()
        number: int = self._port.getsockname()[1]
        return number

    def _say(self, **changes: object) -> None:
        news = msgspec.structs.replace(self._news, **changes)
        if news != self._news:
            self._news = news
            self._tell(news)


def _halt(attempt: Attempt) -> Halt:
    """Return why a crew stops before its end, as far as that is known when it does."""
    assert attempt.reason is not None
    cause = attempt.cause
    if cause is None:
        return Halt(reason=attempt.reason)
    detail = cause.detail[:_DETAIL_CHARACTERS_MAX]
    return Halt(reason=attempt.reason, rank=cause.rank, peer_lost=cause.peer_lost, detail=detail)
