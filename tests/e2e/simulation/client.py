"""Somebody who submits a run, waits for it, perhaps cancels it, and reads what came of it.

What they were told is compared with what they are told later, and with what the ranks really wrote and returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from serverless_gpu.errors import AlreadyFinished, NotFound, ServerlessGpuError, ServerStorageFull
from serverless_gpu.model.lifecycle.attempt import Reason, State, StopReason
from serverless_gpu.model.spec import Function, Resources, RunSpec
from serverless_gpu.server.composition import Services
from serverless_gpu.server.core.caller import Caller
from serverless_gpu.server.records import files, runs
from serverless_gpu.server.runs import run_views
from serverless_gpu.server.runs.run_stream import Place, Position, RunSnapshot, RunStream
from serverless_gpu.server.storage import blobs
from serverless_gpu.wire.runs import (
    EndedMessage,
    GapMessage,
    LogMessage,
    RunRequest,
    RunView,
    SettledMessage,
    StateMessage,
    StreamMessage,
    Target,
)
from tests.e2e.simulation.network import Link, Network
from tests.e2e.simulation.supervisor import line_of, result_of
from tests.e2e.simulation.timeline import Timeline

ALICE = Caller(name="alice", role="member")
TARGET = Target(machine="here", python="3.11", platform="linux-x86_64")
ANYWHERE = Target(machine="", python="3.11", platform="linux-x86_64")
SNAPSHOT = "5" * 64
Size = Literal["usual", "long", "large"]
_GPUS: dict[Size, list[int]] = {"usual": [1, 1, 1, 2, 2, 4, 8], "long": [1], "large": [9, 10, 12, 12, 14]}
SECRET = "hunter2-of-alice"
_AGAIN_S = 1.5
_MISSING = "\n— ".encode()
_LOOK_S = 8.0
REFUSALS = ("policy_violation", "budget_exhausted", "no_suitable_node")
"""What a run is not taken for, as its client is told."""


class Wrong(AssertionError):
    """A client was told something that cannot be."""


class Client:
    """One call of a function on the server; a long one works for a while, on any node, and again if it has to.

    One that is large needs several nodes.

    Attributes:
        acknowledged: whether the submit was answered.
        end: how the run ended, once that was said.
        settled: whether everything was said and read.
        cancelled: whether a stop was answered with success.
        refused: why the run was not taken, where money or a policy forbade it.
    """

    def __init__(
        self,
        time: Timeline,
        network: Network,
        run_id: str,
        rng: random.Random,
        *,
        size: Size = "usual",
        tag: str = "",
    ) -> None:
        self.time, self.network, self.run_id = time, network, run_id
        self.link = Link(f"client of {run_id}")
        self.acknowledged = self.settled = self.cancelled = self.expired = False
        self.refused = ""
        self.end: tuple[State, Reason] | None = None
        self._asks_to_stop = False
        self._seq = 0
        self._early: tuple[State, Reason] | None = None
        self._got: dict[Place, bytearray] = {}
        gpus = rng.choice(_GPUS[size])
        self.request = RunRequest(
            id=run_id,
            spec=RunSpec(
                payload=Function(),
                environment="snapshot" if size == "large" else "live",
                remote=True,
                resources=Resources(gpus=gpus, gpu_type="H100"),
                retries=rng.choice([0, 1, 2]),
                resume=rng.random() < 0.4 or size == "long",
                tags={"project": tag} if tag else {},
            ),
            target=ANYWHERE if size == "large" else TARGET,
            snapshot=SNAPSHOT if size == "large" else "",
            context=msgspec.Raw(b'{"variables": {"PASSWORD": "' + SECRET.encode() + b'"}}'),
            call=b"call of " + run_id.encode(),
        )
        self._submit()

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes of it."""
        return self.settled or self.expired or bool(self.refused)

    def stop(self, why: StopReason = StopReason.CANCEL) -> None:
        """Ask the run to stop, until that is answered."""
        if self._asks_to_stop or not self.acknowledged:
            return
        self._asks_to_stop = True

        def heard(view: RunView) -> None:
            self._asks_to_stop = False
            self.cancelled |= view.stop is why

        def failed(error: ServerlessGpuError) -> None:
            self._asks_to_stop = False
            if isinstance(error, AlreadyFinished):
                return
            if isinstance(error, NotFound):
                self._is_gone()
                return
            self.time.after(_AGAIN_S, lambda: self.stop(why))

        self._ask(lambda services: services.stops.request(ALICE, "own", run_id=self.run_id, why=why), heard, failed)

    def _ask(
        self,
        request: Callable[[Services], Any],
        heard: Callable[[Any], None],
        failed: Callable[[ServerlessGpuError], None],
    ) -> None:
        self.network.ask(self.link, request, heard, failed)

    def _submit(self) -> None:
        def heard(view: RunView) -> None:
            if view.id != self.run_id or view.owner != "alice":
                raise Wrong(f"{self.run_id} was asked for, and {view.id} answered")
            self.acknowledged = True
            self._watch()

        def failed(error: ServerlessGpuError) -> None:
            if error.code in REFUSALS:
                self.refused = error.message
                return
            if not error.retryable and not isinstance(error, ServerStorageFull):
                raise Wrong(f"the submit of {self.run_id} was refused: {error!r}")
            self.time.after(_AGAIN_S, self._submit)

        self._ask(self._asked, heard, failed)

    def _asked(self, services: Services) -> RunView:
        """Ask; what is there already is not refused, whatever was decided about money since."""
        before = services.database.read(lambda connection: runs.exists(connection, self.run_id))
        try:
            return services.submissions.submit(ALICE, self.request)
        except ServerlessGpuError as error:
            if before and error.code in REFUSALS:
                raise Wrong(f"{self.run_id} is there, and was refused when it was asked for again: {error}") from error
            raise

    # --- the stream --------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        position = Position(
            after=self._seq, offsets={place: len(data) for place, data in self._got.items()}, ranks="all"
        )

        def stream(services: Services) -> list[StreamMessage]:
            def look(after: int) -> RunSnapshot:
                told = services.sentences.told(self.run_id)
                return services.database.read(
                    lambda connection: run_views.look(connection, self.run_id, after, told=told)
                )

            watch = RunStream(self.run_id, position, look=look, files=services.logs, clock=services.clock)
            return watch.next()

        self._ask(stream, self._heard, self._unheard)

    def _unheard(self, error: ServerlessGpuError) -> None:
        if isinstance(error, NotFound):
            self._is_gone()
        else:
            self.time.after(_AGAIN_S, self._watch)

    def _is_gone(self) -> None:
        """Take that there is no such run: whether it may be gone is for the audit to say (I1)."""
        self.expired = True

    def _heard(self, messages: Sequence[StreamMessage]) -> None:
        if self.settled:
            return
        for message in messages:
            match message:
                case StateMessage() if message.seq:
                    self._next(message.seq)
                case LogMessage():
                    self._wrote(message)
                case GapMessage():
                    raise Wrong(f"output of {self.run_id} was left out, and there is little of it")
                case EndedMessage(seq=0):  # of several nodes: it is known what ended it, and not all has ended
                    self._early = (message.state, message.reason)
                case EndedMessage():
                    self._next(message.seq)
                    self._ended(message)
                case SettledMessage():
                    self._read_results()
                    return
        self.time.after(_LOOK_S, self._watch)

    def _next(self, seq: int) -> None:
        if seq != self._seq + 1:
            raise Wrong(f"event {seq} of {self.run_id} came after {self._seq}")
        self._seq = seq

    def _wrote(self, message: LogMessage) -> None:
        got = self._got.setdefault((message.fence, message.rank, message.stream), bytearray())
        if message.offset != len(got):
            raise Wrong(f"output of {self.run_id} from {message.offset} on came after {len(got)} bytes")
        got += message.data
        whole = b"".join(line_of(self.run_id, message.fence, number) for number in range(20))
        written, _, missing = bytes(got).partition(_MISSING)  # a full disk is said in the log, and nothing follows it
        if not whole.startswith(written) or (missing and not missing.endswith("—\n".encode())):
            raise Wrong(f"output of {self.run_id} is not what its rank wrote: {bytes(got)!r}")

    def _ended(self, message: EndedMessage) -> None:
        end = (message.state, message.reason)
        if self.end not in (None, end):
            raise Wrong(f"{self.run_id} ended as {self.end}, and then as {end}")
        if self._early not in (None, end):
            raise Wrong(f"{self.run_id} was said to end as {self._early}, and ended as {end}")
        self.end = end

    # --- the results -------------------------------------------------------------------------------------------------

    def _read_results(self) -> None:
        """Read what was said to be there; a reader that comes when all is over gets no ending, and looks."""

        def look(services: Services) -> tuple[RunView, list[bytes]]:
            run = services.database.read(
                lambda connection: run_views.visible(connection, self.run_id, who=ALICE, reach="own")
            )
            stored = services.database.read(
                lambda connection: files.of_attempt(connection, self.run_id, run.fence, prefix="results/")
            )
            stored.sort(key=lambda file: int(file.name.removeprefix("results/").removesuffix(".pkl")))
            data = [b"".join(blobs.file_source(services.blobs, file)(0, file.size)) for file in stored]
            return run_views.run_view(run), data

        def heard(found: tuple[RunView, list[bytes]]) -> None:
            view, data = found
            if self.end is not None and self.end != (view.state, view.reason):
                raise Wrong(f"{self.run_id} ended as {self.end}, and is {view.state}")
            wanted = [result_of(self.run_id, view.fence, rank) for rank in range(view.world_size)]
            if view.state is State.SUCCEEDED and data != wanted:
                raise Wrong(f"{self.run_id} has succeeded, and its results are {data}")
            self.settled = True

        def failed(error: ServerlessGpuError) -> None:
            if isinstance(error, NotFound):
                self._is_gone()
            else:
                self.time.after(_AGAIN_S, self._read_results)

        self._ask(look, heard, failed)
