"""A reader of a run gets everything once and in order, from wherever it is, and a flood is said and not carried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from serverless_gpu.errors import InvalidValue
from serverless_gpu.model.lifecycle.attempt import Reason, State
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.server.core.hub import Hub, run_key
from serverless_gpu.server.runs.run_stream import Place, Position, RunSnapshot, RunStream, parse_offsets, parse_ranks
from serverless_gpu.server.storage.logs import Logs
from serverless_gpu.testing import FakeClock
from serverless_gpu.wire.runs import (
    EndedMessage,
    GapMessage,
    LogMessage,
    RunView,
    SettledMessage,
    StateMessage,
    StreamMessage,
)

RUN = "01kaz5w8d3e4f5g6h7j8k9m0n1"


class Story:
    """A run as a database would have it, changed by the test."""

    def __init__(self, directory: Path, ranks_log: tuple[int, ...] | None = (0,)) -> None:
        self.clock = FakeClock()
        self.logs = Logs(directory / "logs", kept_free_bytes=0)
        self.run = RunView(
            id=RUN,
            name="train",
            state=State.QUEUED,
            reason=None,
            sentence="",
            fence=0,
            owner="ada",
            team="",
            pool="",
            node="",
            gpu_type="",
            world_size=0,
            created_ns=0,
            started_ns=None,
            ended_ns=None,
            stop=None,
            spec=RunSpec(ranks_log=ranks_log),
        )
        self.events: list[StateMessage] = []
        self.ended: EndedMessage | None = None
        self.settled: SettledMessage | None = None

    def event(self, state: State, fence: int, sentence: str = "") -> None:
        self.events.append(StateMessage(seq=len(self.events) + 1, fence=fence, state=state, sentence=sentence))
        self._now(state, fence, sentence)

    def _now(self, state: State, fence: int, sentence: str) -> None:
        fields = {name: getattr(self.run, name) for name in self.run.__struct_fields__}
        self.run = RunView(**{**fields, "state": state, "fence": fence, "sentence": sentence})

    def track(self, url: str) -> None:
        self.run = msgspec.structs.replace(self.run, tracked=url)

    def say(self, sentence: str) -> None:
        self._now(self.run.state, self.run.fence, sentence)

    def end(self, fence: int) -> None:
        seq = len(self.events) + 1
        self._now(State.SUCCEEDED, fence, "")
        self.ended = EndedMessage(seq=seq, fence=fence, state=State.SUCCEEDED, reason=Reason.COMPLETED)

    def write(self, data: bytes, *, fence: int = 1, rank: int = 0, stream: str = "stdout") -> None:
        offset = self.logs.size(RUN, fence, rank=rank, stream=stream)
        self.logs.append(RUN, fence, rank=rank, stream=stream, offset=offset, data=data)

    def look(self, after: int) -> RunSnapshot:
        events = tuple(event for event in self.events if event.seq > after)
        return RunSnapshot(run=self.run, events=events, ended=self.ended, settled=self.settled)

    def watch(self, position: Position | None = None) -> RunStream:
        return RunStream(RUN, position or Position(), look=self.look, files=self.logs, clock=self.clock)


def everything(watch: RunStream) -> list[StreamMessage]:
    found: list[StreamMessage] = []
    while more := watch.next():
        found += more
    return found


def told(messages: Sequence[StreamMessage | None]) -> list[str]:
    """Return messages as short words, pieces of one stream joined."""
    words: list[str] = []
    for message in messages:
        if isinstance(message, LogMessage):
            words.append(f"{message.fence}.{message.rank}.{message.stream} {message.data.decode()!r}")
        elif isinstance(message, StateMessage):
            words.append(f"{message.seq} {message.state}")
        else:
            words.append(type(message).__name__)
    return words


def test_events_output_ending_and_receipt_come_in_the_order_of_the_run(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.QUEUED, 0)
    story.event(State.STARTING, 1)
    story.event(State.RUNNING, 1)
    story.write(b"hello\n")
    story.write(b"oh\n", stream="stderr")
    story.end(1)
    story.settled = SettledMessage()
    watch = story.watch()
    assert told(everything(watch)) == [
        "1 QUEUED",
        "2 STARTING",
        "3 RUNNING",
        "1.0.stdout 'hello\\n'",
        "1.0.stderr 'oh\\n'",
        "EndedMessage",
        "SettledMessage",
    ]
    assert watch.over


def test_output_of_an_attempt_comes_before_the_event_that_it_is_over(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.RUNNING, 1)
    story.write(b"one\n", fence=1)
    story.event(State.QUEUED, 1, "its node was lost")
    story.event(State.RUNNING, 2)
    story.write(b"two\n", fence=2)
    words = told(everything(story.watch()))
    assert words == ["1 RUNNING", "1.0.stdout 'one\\n'", "2 QUEUED", "3 RUNNING", "2.0.stdout 'two\\n'"]


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_F65_a_reader_that_comes_again_and_again_misses_nothing_and_gets_nothing_twice(
    tmp_path: Path, step: int
) -> None:
    story = Story(tmp_path, ranks_log=None)
    story.event(State.RUNNING, 1)
    written = {rank: b"".join(b"rank %d line %d\n" % (rank, line) for line in range(20_000)) for rank in (0, 1)}
    for rank, data in written.items():
        story.write(data, rank=rank)
    story.end(1)
    story.settled = SettledMessage()
    after, offsets, seen = 0, dict[Place, int](), {0: b"", 1: b""}
    kinds: list[type] = []
    for _ in range(2_000):
        watch = story.watch(Position(after=after, offsets=dict(offsets)))
        for message in watch.next()[:step]:  # the connection breaks after a few messages
            if isinstance(message, LogMessage):
                place = (message.fence, message.rank, message.stream)
                assert message.offset == offsets.get(place, 0)
                offsets[place] = message.offset + len(message.data)
                seen[message.rank] += message.data
            else:
                kinds.append(type(message))
                after = max(after, getattr(message, "seq", 0))
        if SettledMessage in kinds:
            break
    assert seen == written
    assert kinds.count(StateMessage) == 1
    assert kinds[-2:] == [EndedMessage, SettledMessage]


def test_a_flood_is_cut_with_a_gap_that_says_how_much_and_shows_the_last_lines(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.RUNNING, 1)
    watch = story.watch()
    lines = b"x" * 999 + b"\n"
    shown, gaps, at = 0, 0, 0
    for _ in range(30):  # 30 s of 10 MB/s
        story.write(lines * 10_000)
        for message in everything(watch):
            if isinstance(message, LogMessage | GapMessage):
                assert message.offset == at
                at += len(message.data) if isinstance(message, LogMessage) else message.size
                shown += len(message.data) if isinstance(message, LogMessage) else 0
                gaps += isinstance(message, GapMessage)
        story.clock.advance(1.0)
    assert 10 <= gaps <= 30
    assert shown < 8_000_000 + 30 * 1_100_000
    story.write(b"the last line\n")
    story.end(1)
    last = everything(watch)
    assert isinstance(last[-1], EndedMessage)
    assert isinstance(last[-2], LogMessage)
    assert last[-2].data.endswith(b"the last line\n")
    assert last[-2].offset + len(last[-2].data) == story.logs.size(RUN, 1, rank=0, stream="stdout")


def test_one_look_reads_a_bounded_amount_however_many_ranks_there_are(tmp_path: Path) -> None:
    story = Story(tmp_path, ranks_log=None)
    story.event(State.RUNNING, 1)
    for rank in range(100):
        story.write(b"y" * 100_000, rank=rank)
    watch = story.watch()
    sizes = []
    while more := watch.next():
        sizes.append(sum(len(message.data) for message in more if isinstance(message, LogMessage)))
    assert max(sizes) < 2 << 20
    assert sum(sizes) == 100 * 100_000


def test_an_ending_is_read_once_however_much_output_comes_before_it(tmp_path: Path) -> None:
    story = Story(tmp_path, ranks_log=None)
    story.event(State.RUNNING, 1)
    for rank in range(50):
        story.write(b"y" * 100_000, rank=rank)
    story.end(1)
    looks: list[int] = []

    def look(after: int) -> RunSnapshot:
        looks.append(after)
        return story.look(after)

    watch = RunStream(RUN, Position(), look=look, files=story.logs, clock=story.clock)
    found = everything(watch)
    assert sum(len(message.data) for message in found if isinstance(message, LogMessage)) == 50 * 100_000
    assert told(found)[0] == "1 RUNNING" and told(found)[-1] == "EndedMessage"
    assert looks == [0, 2]
    story.settled = SettledMessage()
    assert told(everything(watch)) == ["SettledMessage"]


def test_a_sentence_that_is_no_event_is_said_once(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.QUEUED, 0)
    watch = story.watch()
    assert told(everything(watch)) == ["1 QUEUED"]
    story.say("needs 8 H100 on one node; 5 free on n3; you are 2nd")
    assert told(everything(watch)) == ["0 QUEUED"]
    assert everything(watch) == []


def test_the_link_to_mlflow_is_said_once(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.RUNNING, 1, "it runs")
    watch = story.watch()
    assert told(everything(watch)) == ["1 RUNNING"]
    story.track("http://127.0.0.1:5000/#/experiments/1/runs/m1")
    [message] = everything(watch)
    assert isinstance(message, StateMessage)
    assert (message.seq, message.sentence, message.tracked) == (0, "it runs", story.run.tracked)
    story.say("it runs on")
    assert told(everything(watch)) == ["0 RUNNING"] and everything(watch) == []


def test_samples_of_nodes_are_not_shown_live(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.RUNNING, 1)
    story.write(b"hello\n")
    story.write(b"[1]\n", stream="telemetry")
    for ranks in (None, "all"):
        assert told(everything(story.watch(Position(ranks=ranks))))[1:] == ["1.0.stdout 'hello\\n'"]
    with pytest.raises(InvalidValue):
        parse_offsets("1.0.telemetry:3")


def test_other_ranks_than_those_shown_can_be_asked_for(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.event(State.RUNNING, 1)
    for rank in range(3):
        story.write(b"%d\n" % rank, rank=rank)
    assert told(everything(story.watch(Position(ranks=(2,)))))[1:] == ["1.2.stdout '2\\n'"]
    assert len(everything(story.watch(Position(ranks="all")))) == 4


def test_a_touch_brings_the_news_and_a_closed_hub_ends_the_stream(tmp_path: Path) -> None:
    async def tale() -> None:
        story, hub = Story(tmp_path), Hub()
        story.event(State.RUNNING, 1)

        async def in_thread(work: Callable[[], list[StreamMessage]]) -> list[StreamMessage]:
            return await asyncio.to_thread(work)

        messages = story.watch().messages(hub, in_thread)
        assert told([await anext(messages)]) == ["1 RUNNING"]
        story.write(b"news\n")
        hub.touch(run_key(RUN))
        assert told([await anext(messages)]) == ["1.0.stdout 'news\\n'"]
        hub.close()
        assert [m async for m in messages] == []

    asyncio.run(tale())


def test_offsets_and_ranks_are_read_strictly() -> None:
    assert parse_offsets("1.0.stdout:17,2.3.stderr:0") == {(1, 0, "stdout"): 17, (2, 3, "stderr"): 0}
    assert parse_offsets("") == {}
    assert (parse_ranks(""), parse_ranks("all"), parse_ranks("0,7")) == (None, "all", (0, 7))
    for bad in ("1.0.stdin:1", "1.0.stdout", "1.0.stdout:-1", "x", "1.0.stdout:1.5", "²" + ".0.stdout:1"):
        with pytest.raises(InvalidValue):
            parse_offsets(bad)
    for bad in ("-1", "0,,1", "a", "9" * 9, ",".join("0" * 200)):
        with pytest.raises(InvalidValue):
            parse_ranks(bad)
