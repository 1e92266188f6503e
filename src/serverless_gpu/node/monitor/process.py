"""The monitor: samples the node while a run uses it, and delivers runs to MLflow.

    supervisors ──one connection each──▶ ┌──────────── main thread ────────────┐ ──once a second──▶ SamplerThread
    agent, `sgpu top` ─────────────────▶ │ Recorder per attempt, frames        │ ◀──NodeSample───
                                         │ MlflowDeliveries                    │ ──▶ AttemptDelivery (a thread each)
                                         └─────────────────────────────────────┘                 ─▶ MLflow

The monitor is a detached process, one per installation. The agent starts the monitor on demand and remains connected to
it. The agent detects the monitor's end by end of file on the connection. The monitor makes no decisions about a run.
Only the start of programs waits for the monitor.

    Observe ─▶ Backlog.keep ─▶ AttemptDelivery ─▶ delivered, refused, given up ─▶ ClaimedAttempt.drop
    every 15 s, with free threads: Backlog.take ─▶ Recorder without a supervisor ─▶ AttemptDelivery ─▶ …

The monitor runs one thread per running attempt and at most 32 threads for ended attempts. If MLflow is unreachable for
hours, further ended attempts wait on disk (`backlog.py`). The monitor stores the runs' credentials by tracker and only
in memory. An attempt waits until the monitor has the credentials for its tracker.

Failure cases:

If the monitor is killed, runs continue. The agent starts another monitor. Supervisors connect to the new monitor and
resend their messages. The backlog on disk contains the undelivered data.

If MLflow refuses data, hangs or fails, samples remain on disk until MLflow answers.

If two monitors start at once, the monitor without the lock exits.

If a GPU driver hangs, the monitor stops sampling its GPUs (`sampler.py`) but still reads messages.

If a peer does not read, the monitor drops passing messages and queues a limited number of other messages.

If the home directory or the monitor's socket is deleted, the monitor exits.

An idle monitor exits a few seconds after the last connection has closed and MLflow has received all data.

After `sgpu stop`, the monitor has three seconds to send undelivered data. The next monitor delivers the remaining data.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.model.hardware import Device
from serverless_gpu.node.attempt.history import is_live
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.base.lock_files import hold
from serverless_gpu.node.inside import linux
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.mlflow_server.server import ensure_server
from serverless_gpu.node.monitor import messages
from serverless_gpu.node.monitor.backlog import KEPT_MAX, Backlog, BacklogAttempt, has_secrets, key_of, origin_of
from serverless_gpu.node.monitor.delivery import AttemptDelivery, target_of
from serverless_gpu.node.monitor.messages import Peer
from serverless_gpu.node.monitor.recorder import Recorder, sample_of
from serverless_gpu.node.monitor.sampler import MachineSampler, NodeSample, SampleRequest, SamplerThread, WakeupEvent
from serverless_gpu.node.processes.spawn import bound_log
from serverless_gpu.tracking.mlflow import make_ready

PEERS_MAX = 1_024
ENDED_MAX = 32
IDLE_S = 5.0
GRACE_S = 3.0
_EVERY_NS = 10**9
_FIRST_NS = _EVERY_NS // 4  # Delay of the first sample, because ranks that have just started need the CPU cores.
_LOOK_NS = 15 * 10**9
_SECRETS_MAX = 64
_TURN_S = 5.0
_LOOK_S = 0.25  # Interval in seconds between two checks while deliveries are active.
_BREATH_S = 0.05


def main(home: str, sockets: str, ready_fd: int) -> NoReturn:
    """Run the monitor until it is idle.

    The process closes `ready_fd` once any monitor accepts connections.
    """
    if os.fork():
        os._exit(0)  # Fork, because a starter that exits first cannot reap the monitor.
    linux.set_name("sgpu-monitor")
    linux.be_ordinary()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    path = messages.monitor_socket(Path(sockets))
    if hold(path.with_suffix(".lock"), str(os.getpid())) is None:
        os._exit(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    monitor = Monitor(Home(Path(home)), path, SystemClock())
    os.close(ready_fd)
    # A thread imports the delivery code early, because the first run may end soon.
    threading.Thread(target=make_ready, name="make ready", daemon=True).start()
    monitor.serve()
    sys.stdout.flush()
    os._exit(0)  # Skip joining threads, because a thread may wait for a hanging driver.


class Monitor:
    """The monitor's event loop, which listens on the socket at `path`."""

    def __init__(self, home: Home, path: Path, clock: Clock) -> None:
        self._home = home
        self._path = path
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._wakeup = WakeupEvent()
        self._sampler = SamplerThread(lambda: MachineSampler(home.root), clock, self._wakeup.set)
        self._deliveries = MlflowDeliveries(home, clock, self._wakeup.set)
        self._peers: dict[int, Peer] = {}
        self._recorders: dict[str, Recorder] = {}
        self._of_peer: dict[Peer, Recorder] = {}
        self._used_ns = clock.boottime_ns()
        self._due_ns = 0
        self._retiring_ns: int | None = None
        self._selector.register(self._wakeup.fd, selectors.EVENT_READ, self._wakeup.clear)
        self._listener = self._listen()

    def serve(self) -> None:
        """Handle events until the monitor is idle."""
        while not self._is_done():
            pause_s = _LOOK_S if self._recorders else _TURN_S
            if self._is_needed():
                pause_s = max(0.0, (self._due_ns - self._clock.boottime_ns()) / 1e9)
            for key, _ in self._selector.select(pause_s):
                callback: Callable[[], None] = key.data
                callback()
            self._tend()
        self._listener.close()
        if self._is_ours():
            self._path.unlink(missing_ok=True)

    # --- connections ---------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._path))
        listener.listen(256)
        listener.setblocking(False)
        self._inode = self._path.stat().st_ino
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _is_ours(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_ino == self._inode
        return False

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            # Without free descriptors, accept would fail at once in a busy loop.
            select.select([], [], [], _BREATH_S)
            return
        if len(self._peers) >= PEERS_MAX:
            sock.close()
            return
        peer = Peer(Channel(sock))
        self._peers[peer.channel.fileno()] = peer
        self._selector.register(peer.channel, selectors.EVENT_READ, lambda: self._hear(peer))

    def _hear(self, peer: Peer) -> None:
        try:
            message = peer.receive()
        except BlockingIOError:
            return
        self._used_ns = self._clock.boottime_ns()
        if message is None:
            self._drop(peer)
            return
        match message:
            case messages.Observe():
                self._observe(peer, message)
            case messages.WatchNode():
                peer.watch = message
                self._due_ns = 0
            case messages.RetireMonitor():
                self._retiring_ns = self._clock.boottime_ns()
                if self._is_observing():
                    with contextlib.suppress(OSError):
                        peer.send(
                            messages.UserSentence(sentence="the monitor exits after the last running attempt has ended")
                        )
            case messages.Ranks() | messages.EndingNote() | messages.Settled() if peer in self._of_peer:
                first_ns = self._clock.boottime_ns() + _FIRST_NS
                if not self._is_needed() or self._due_ns > first_ns:  # A reader of frames may wait for seconds.
                    self._due_ns = first_ns
                self._of_peer[peer].receive(message)
            case messages.Prepare():
                self._deliveries.prepare(message)
            case _:
                pass

    def _drop(self, peer: Peer) -> None:
        if self._peers.pop(peer.channel.fileno(), None) is None:
            return
        self._selector.unregister(peer.channel)
        peer.channel.close()
        recorder = self._of_peer.pop(peer, None)
        if recorder is not None and recorder.peer is peer:
            recorder.lose()

    def _observe(self, peer: Peer, observe: messages.Observe) -> None:
        new = Recorder(observe, origin_of(observe, self._clock), self._clock)
        recorder = self._recorders.setdefault(new.key, new)
        if recorder is new:
            self._deliveries.begin(recorder)
        self._of_peer[peer] = recorder
        recorder.join(peer)

    # --- event loop tasks ----------------------------------------------------------------------------------------

    def _tend(self) -> None:
        for peer in [peer for peer in self._peers.values() if peer.behind]:
            with contextlib.suppress(OSError):  # The event loop detects the closed connection later.
                peer.flush()
        sample = self._sampler.take()
        if sample is not None:
            self._show(sample)
        now_ns = self._clock.boottime_ns()
        if now_ns >= self._due_ns and self._is_needed():
            every_ns = self._every_ns()
            self._due_ns = max(now_ns, self._due_ns + every_ns) if self._due_ns else now_ns + every_ns
            self._sampler.ask(self._wanted())
        for recorder in self._recorders.values():
            recorder.tend()
        for recorder in list(self._deliveries.tend(self._recorders)):
            self._recorders[recorder.key] = recorder
        for recorder in [recorder for recorder in self._recorders.values() if recorder.is_over]:
            del self._recorders[recorder.key]
        bound_log(1)

    def _wanted(self) -> SampleRequest:
        devices: dict[str, Device] = {}
        ranks: dict[str, dict[int, int]] = {}
        used_by: dict[str, tuple[str, int]] = {}
        for recorder in self._recorders.values():
            if recorder.ranks is None or not recorder.is_sampled:
                continue
            ranks[recorder.key] = recorder.ranks.pids
            used_by.update(recorder.used_by())
            devices.update({device.uuid: device for device in recorder.devices})
        fakes = next((peer.watch.fakes for peer in self._peers.values() if peer.watch is not None), None)
        return SampleRequest(devices=tuple(devices.values()), ranks=ranks, used_by=used_by, fakes=fakes)

    def _show(self, sample: NodeSample) -> None:
        for recorder in self._recorders.values():
            recorder.record(sample)
        watchers = [peer for peer in self._peers.values() if peer.watch is not None]
        if not watchers:
            return
        live = {key: recorder for key, recorder in self._recorders.items() if recorder.is_observed}
        frame = messages.NodeFrame(
            devices=sample.devices,
            sample=sample_of(sample, sample.devices, *live),
            attempts=tuple(recorder.watched() for recorder in live.values()),
        )
        for peer in watchers:
            with contextlib.suppress(OSError):
                peer.send(frame, passing=True)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _is_observing(self) -> bool:
        return any(recorder.is_observed for recorder in self._recorders.values())

    def _is_needed(self) -> bool:
        """Return True if an attempt or a client needs samples."""
        watched = any(peer.watch is not None for peer in self._peers.values())
        return watched or any(recorder.is_sampled for recorder in self._recorders.values())

    def _every_ns(self) -> int:
        """Return the nanoseconds between two samples: one second, unless all readers accept more."""
        if any(recorder.is_sampled for recorder in self._recorders.values()):
            return _EVERY_NS
        wanted_s = [peer.watch.interval_s for peer in self._peers.values() if peer.watch is not None]
        return max(_EVERY_NS, round(min(wanted_s, default=0.0) * 1e9))

    def _is_done(self) -> bool:
        now_ns = self._clock.boottime_ns()
        if not self._is_ours():
            return True
        if self._retiring_ns is None:
            return not self._peers and not self._recorders and now_ns - self._used_ns > IDLE_S * 1e9
        if self._is_observing():
            self._retiring_ns = now_ns
        return not self._recorders or now_ns - self._retiring_ns > GRACE_S * 1e9


class MlflowDeliveries:
    """The active deliveries and the attempts that wait for a delivery."""

    def __init__(self, home: Home, clock: Clock, wake: Callable[[], None]) -> None:
        self._home = home
        self._clock = clock
        self._wake = wake
        self._backlog = Backlog(home.tracking, clock)
        self._away: dict[str, messages.Untracked] = {}
        self._secrets: dict[str, Mapping[str, str]] = {}
        self._waiting: dict[str, str] = {}  # Tracker whose credentials an attempt waits for, by attempt key
        self._looked_ns: int | None = None

    def prepare(self, message: messages.Prepare) -> None:
        """Start the installation's MLflow server if the next run will need it."""
        if not message.tracker.uri:
            ensure_server(self._home, message.python, message.tracker.store, environ=message.environ)
        self._remember(message.tracker.uri, message.environ)

    def begin(self, recorder: Recorder) -> None:
        """Start the delivery of an observed attempt if the attempt is tracked."""
        observe = recorder.observe
        if observe.spec.tracker is None:
            return
        self._remember(observe.spec.tracker.uri, observe.environ)
        kept = BacklogAttempt(observe=observe, origin_ns=recorder.origin_ns)
        held = self._backlog.keep(observe, recorder.origin_ns)
        delivery = recorder.delivery = AttemptDelivery(self._home, kept, observe.environ, held, self._wake)
        # If the tracker's state is known, ranks need not wait for the tracker. `tracking.json` shows the state after
        # the next delivery attempt.
        delivery.status = self._away.get(delivery.target)
        delivery.start()

    def tend(self, recorders: Mapping[str, Recorder]) -> Iterator[Recorder]:
        """Control the deliveries of ended attempts.

        Yield recorders for attempts that an earlier monitor left undelivered.
        """
        ended = 0
        for recorder in recorders.values():
            delivery = recorder.delivery
            if delivery is None:
                continue
            if self._note(delivery):
                self._recover(delivery.target, recorders)
            if delivery.is_done:
                self._bury(delivery)
            elif not recorder.is_observed:
                ended += 1
                if ended > ENDED_MAX:
                    delivery.stop()
        now_ns = self._clock.boottime_ns()
        if ended < ENDED_MAX and (self._looked_ns is None or now_ns - self._looked_ns > _LOOK_NS):
            self._looked_ns = now_ns
            waiting = {key for key, target in self._waiting.items() if target not in self._secrets}
            yield from self._taken(waiting.union(recorders), ENDED_MAX - ended)

    def _taken(self, known: Collection[str], limit: int) -> Iterator[Recorder]:
        for kept, held in self._backlog.take(known, limit, self._is_ready):
            target = target_of(kept.observe)
            environ = {**kept.observe.environ, **self._secrets.get(target, {})}
            recorder = Recorder(kept.observe, kept.origin_ns, self._clock)
            recorder.delivery = AttemptDelivery(self._home, kept, environ, held, self._wake)
            recorder.delivery.start()
            yield recorder

    def _is_ready(self, kept: BacklogAttempt) -> bool:
        """Return True if the monitor can deliver an attempt now.

        An attempt without its tracker's credentials waits.
        """
        key, target = key_of(kept.observe), target_of(kept.observe)
        self._waiting.pop(key, None)
        if kept.has_secrets and target not in self._secrets:
            if len(self._waiting) >= KEPT_MAX:
                self._waiting.clear()
            self._waiting[key] = target
            return False
        return not is_live(Path(kept.observe.directory))

    def _note(self, delivery: AttemptDelivery) -> bool:
        """Record whether a tracker answers. Return True if the tracker answers again after a failure."""
        match delivery.take_answer():
            case messages.TrackedNote():
                return self._away.pop(delivery.target, None) is not None
            case messages.Untracked(final=False) as away:
                self._away[delivery.target] = away
            case _:
                pass
        return False

    def _recover(self, target: str, recorders: Mapping[str, Recorder]) -> None:
        """Continue all deliveries that wait for a tracker, because the tracker answers again."""
        self._looked_ns = None
        for recorder in recorders.values():
            if recorder.delivery is not None and recorder.delivery.target == target:
                recorder.delivery.wake()

    def _bury(self, delivery: AttemptDelivery) -> None:
        if delivery.held is None:
            return
        if delivery.over:
            delivery.held.drop()
        else:
            delivery.held.leave()
        delivery.held = None

    def _remember(self, target: str, environ: Mapping[str, str]) -> None:
        if target and has_secrets(environ):
            if self._secrets.pop(target, None) is None:
                self._looked_ns = None
            self._secrets[target] = environ
            while len(self._secrets) > _SECRETS_MAX:
                del self._secrets[next(iter(self._secrets))]
