"""Holds the devices of a session and lends the devices to the session's runs.

    owner (notebook, script) ──Launch──▶ agent ──▶ this process ◀──Borrow── supervisor of a run
                             ◀── SessionReady, WaitingNote, Finished ──┘   ──Lent───▶

The nursery forks the session's process like a supervisor. The session's process does not depend on the agent, and runs
one event loop in one thread. `model/lifecycle/session.py` decides which run gets which devices.

Failure cases:

If the session's owner exits, for example because a notebook kernel is killed, the session ends at once. A forked child
with a copy of the owner's socket does not delay the session's end. At its end, the session cancels waiting runs. Runs
that use the session's devices continue, because their supervisors and stems have copies of the lock descriptors.

If a run's supervisor is killed, the run's device loan ends once the stem has ended too. The stem's exit closes the
loan's pipe. The session verifies returned devices before another run gets them.

If the session's process is killed, idle devices are free at once. Lent devices become free when their runs end. The
owner's next call reports that the session has ended.

If no run uses the session, the owner gets a warning at four fifths of the idle limit. The session ends at the idle
limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import socket
import struct
import time
from pathlib import Path

import msgspec

from serverless_gpu.ambient import Clock, SystemClock
from serverless_gpu.errors import ServerlessGpuError, StorageError
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.lifecycle.attempt import MEANINGS, Attempt, FactKind, Failure, Reason, State
from serverless_gpu.model.lifecycle.session import (
    DeviceRequest,
    SessionState,
    ask,
    idle_action,
    leave,
    mark_unfit,
    settle,
    waiting_text,
    wake_ns,
)
from serverless_gpu.node.attempt.usage_account import AttemptAccount, write_json
from serverless_gpu.node.base import protocol
from serverless_gpu.node.base.home import Home
from serverless_gpu.node.devices.gpu_gate import GatePolicy, Verdict, verify
from serverless_gpu.node.devices.inventory import Provider
from serverless_gpu.node.devices.locks import DeviceLocks, lock_directory
from serverless_gpu.node.devices.reservation import DeviceReservation, quarantine
from serverless_gpu.node.inside.channel import Channel
from serverless_gpu.node.output.attached_clients import Watcher, Watchers

_RETRY_S = 0.05  # Seconds between two attempts to reserve devices that were in use.
_RETEST_S = 1.0  # Seconds between two checks of quarantined devices that a run waits for.
_TURN_S = 5.0
_LEAVING_S = 1.0  # Seconds for which the stem of a run may keep devices after the run has returned them.


class SessionHolder:
    """Holds the devices of one session.

    The session ignores end of file on the channel `agent`.
    """

    def __init__(self, assign: protocol.Assign, agent: Channel, home: Home, sockets: Path, machine: Provider) -> None:
        self._launch = assign.launch
        self._directory = Path(self._launch.directory)
        self._agent = agent
        self._home = home
        self._machine = machine
        self._clock: Clock = SystemClock()
        self._account = AttemptAccount(self._launch, self._clock)
        self._account.runs = 0
        self._account.mark("asked", assign.asked_ns)
        self._selector = selectors.DefaultSelector()
        self._audience = Watchers(sockets / f"{self._launch.run_id}.sock", self._selector, self._snapshot, self._obey)
        self._limit_ns = round((self._launch.idle_timeout_s or 0) * 1e9)
        self._reservation: DeviceReservation | None = None
        self._book: SessionState | None = None
        self._billed: tuple[Device, ...] = ()
        self._borrowers: dict[str, Watcher] = {}
        self._reported: dict[str, tuple[str, ...]] = {}  # Devices that a run's supervisor returned as not free, by run.
        self._said: dict[str, str] = {}
        self._returning: list[str] = []
        self._owner: Watcher | None = None
        self._waiting = ""
        self._look_again_ns = 0
        self._ending: str | None = None  # Reason for the session's end, or None while the session continues.
        self._leave_by_ns = 0
        self._done = False

    def serve(self, client: Channel) -> None:
        """Serve the session until its owner disconnects."""
        lock = os.open(self._directory / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)  # The session's process holds the lock for its lifetime, like a supervisor.
        self._account.prepare()
        self._owner = self._audience.add(client)
        # The pidfd reports the owner's end even if a forked child keeps a copy of the socket.
        credentials = client.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        with contextlib.suppress(OSError):  # The owner has already ended, or is in another pid namespace.
            process = os.pidfd_open(struct.unpack("3i", credentials)[0])
            self._selector.register(process, selectors.EVENT_READ, lambda: self._owner_ended(process))
        self._audience.tell(protocol.Accepted(pid=os.getpid()))
        problem = self._audience.listen()
        if problem:
            self._fail(problem)  # Without the socket, no run could borrow devices.
        else:
            try:
                self._reservation = DeviceReservation(self._launch, self._home, self._clock, self._machine)
            except ServerlessGpuError as error:
                self._fail(error.message)
        while not self._done:
            for key, _ in self._selector.select(self._pause_s()):
                key.data()
            if self._owner.gone:
                self._end("the session's owner has ended")
            self._look()

    def _owner_ended(self, process: int) -> None:
        self._selector.unregister(process)
        os.close(process)
        self._end("the session's owner has ended")

    # --- devices -------------------------------------------------------------------------------------------------

    def _try_devices(self, reservation: DeviceReservation) -> None:
        try:
            sentence = reservation.try_take()
        except ServerlessGpuError as error:
            self._fail(error.message)
            return
        if sentence is None:
            self._account.mark("reserved")
            self._account.mark("exec")
            self._account.fact(FactKind.RESERVED, reservation.devices)
            self._book = SessionState(devices=reservation.devices, idle_ns=self._clock.boottime_ns())
            self._bill()
            self._waiting = ""
            self._audience.tell(protocol.SessionReady(devices=reservation.devices))
        elif sentence != self._waiting:
            self._waiting = sentence
            self._audience.tell(protocol.WaitingNote(sentence=sentence))

    def _bill(self) -> None:
        """Record which devices are idle from now on. The runs' accounts contain the lent devices."""
        idle = self._book.idle if self._book is not None else ()
        if idle == self._billed:
            return
        if self._billed:
            self._account.fact(FactKind.FREED, self._billed)
        if idle:
            self._account.fact(FactKind.HELD, idle)
        self._billed = idle

    # --- loans ---------------------------------------------------------------------------------------------------

    def _obey(self, message: protocol.AnyMessage, watcher: Watcher) -> None:
        match message:
            case protocol.Cancel():
                self._end(
                    "" if watcher is self._owner else "another client ended the session, for example with `sgpu cancel`"
                )
            case protocol.Borrow(run_id=run_id, count=count) if self._book is not None and self._ending is None:
                self._borrowers[run_id] = watcher
                self._book = ask(self._book, DeviceRequest(run_id, count))
                self._lend(self._book)
            case protocol.Returned(unfit=unfit):
                for run_id, borrower in self._borrowers.items():
                    if borrower is watcher:
                        self._reported[run_id] = unfit
            case _:
                pass

    def _lend(self, book: SessionState) -> None:
        """Lend devices to the first runs in the queue. Report to the waiting runs why they wait."""
        self._book, served = settle(mark_unfit(book, book.unfit | self._failed(book)))
        self._bill()  # No device may be in two accounts at once.
        for run_id in served:
            self._hand_over(run_id, self._book.loans[run_id])
        for asker in self._book.queue:
            sentence = waiting_text(self._book, asker)
            if self._said.get(asker.run_id) != sentence:
                self._said[asker.run_id] = sentence
                self._borrowers[asker.run_id].send(protocol.WaitingNote(sentence=sentence))

    def _failed(self, book: SessionState) -> frozenset[str]:
        """Return the idle devices that have been quarantined since the session took them."""
        if self._reservation is None or not book.queue:
            return frozenset()
        try:
            locks = DeviceLocks(lock_directory(self._launch.candidates[0].kind, self._home.root))
            failed = {uuid for uuid, note in locks.quarantined().items() if locks.is_settled(note)}
        except StorageError:
            return frozenset()
        return frozenset(device.uuid for device in book.idle if device.uuid in failed)

    def _hand_over(self, run_id: str, devices: tuple[Device, ...]) -> None:
        assert self._reservation is not None
        read, write = os.pipe2(os.O_CLOEXEC)
        borrower = self._borrowers[run_id]
        fds = self._reservation.fds_of([device.uuid for device in devices])
        try:
            borrower.flush()  # The run must receive earlier waiting messages before the loan.
            protocol.send(borrower.channel, protocol.Lent(devices=devices), (*fds, write))
            self._account.runs = (self._account.runs or 0) + 1
        except OSError:
            borrower.gone = True  # The run's supervisor has closed its socket.
            # The run never received the devices. End of file on the loan's pipe signals the return of the devices.
            self._reported[run_id] = ()
        finally:
            os.close(write)
        self._selector.register(read, selectors.EVENT_READ, lambda: self._loan_over(read, run_id))

    def _loan_over(self, read: int, run_id: str) -> None:
        self._selector.unregister(read)
        os.close(read)
        # The session ends a loan after this event loop iteration, because the run's last message may still be unread.
        self._returning.append(run_id)

    def _take_back(self, book: SessionState, run_id: str) -> SessionState:
        devices = book.loans.get(run_id, ())
        unfit = self._reported.pop(run_id, None)
        # The run's supervisor was killed. The session checks the devices only once, because waiting would block all
        # runs of the session.
        if unfit is None:
            unfit = self._verified(devices, run_id, GatePolicy(pauses_s=()))[1]
        self._borrowers.pop(run_id, None)
        self._said.pop(run_id, None)
        return mark_unfit(leave(book, run_id, self._clock.boottime_ns()), {*book.unfit, *unfit})

    def _verified(
        self, devices: tuple[Device, ...], run_id: str, policy: GatePolicy
    ) -> tuple[dict[str, Verdict], tuple[str, ...]]:
        """Return the verdict of each device and the devices that are now quarantined."""
        if self._reservation is None or not devices:
            return {}, ()
        provider = self._reservation.provider
        uuids = [device.uuid for device in devices]
        verdicts = verify(provider, uuids, self._reservation.before, policy, time.sleep)
        locks = DeviceLocks(lock_directory(devices[0].kind, self._home.root))
        return verdicts, quarantine(locks, verdicts, run_id)

    # --- event loop tasks ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        if self._book is not None:
            self._book = self._after_turn(self._book)
            self._bill()
            if self._ending is None:
                self._lend(self._retested(self._book))
                self._look_at_time(self._book)
        elif self._reservation is not None and self._ending is None:
            self._try_devices(self._reservation)
        self._audience.tend()
        if self._ending is not None:
            loans = self._book.loans if self._book is not None else {}
            # The run's stem still holds devices that the run has returned.
            is_leaving = bool(loans.keys() & self._reported.keys())
            if not is_leaving or self._clock.boottime_ns() >= self._leave_by_ns:
                self._conclude(None)

    def _after_turn(self, book: SessionState) -> SessionState:
        """Return the session state without runs that returned their devices or left the queue."""
        returning, self._returning = self._returning, []
        for run_id in returning:
            book = self._take_back(book, run_id)
        for asker in book.queue:
            if self._borrowers[asker.run_id].gone:
                book = leave(book, asker.run_id, self._clock.boottime_ns())
                del self._borrowers[asker.run_id]
        return book

    def _retested(self, book: SessionState) -> SessionState:
        """Check unfit devices again while a run waits for devices."""
        now_ns = self._clock.boottime_ns()
        if not (book.unfit and book.queue and self._reservation is not None) or now_ns < self._look_again_ns:
            return book
        self._look_again_ns = now_ns + int(_RETEST_S * 1e9)
        return mark_unfit(book, book.unfit & self._reservation.retest_quarantined().keys())

    def _look_at_time(self, book: SessionState) -> None:
        now_ns = self._clock.boottime_ns()
        self._book, sentence, over = idle_action(book, self._limit_ns, now_ns)
        if over:
            self._end(sentence)
        elif sentence:
            self._audience.tell(protocol.WaitingNote(sentence=sentence))
        elif self._billed:
            self._account.alive(self._billed)

    def _pause_s(self) -> float:
        if self._returning or self._done:
            return 0.0
        if self._ending is not None:
            return _RETRY_S
        if self._book is None:
            return _RETRY_S * min(20, 1 + (self._reservation.ahead if self._reservation is not None else 0))
        pauses = [_RETRY_S if self._audience.waiting else _TURN_S]
        if self._book.unfit and self._book.queue:
            pauses.append(_RETEST_S)
        wake = wake_ns(self._book, self._limit_ns)
        if wake is not None:
            pauses.append(max(0.0, (wake - self._clock.boottime_ns()) / 1e9))
        return min(pauses)

    def _snapshot(self) -> protocol.AttemptSnapshot:
        return protocol.AttemptSnapshot(
            run_id=self._launch.run_id,
            fence=self._launch.fence,
            state=State.QUEUED if self._book is None else State.RUNNING,
            pid=os.getpid(),
            waiting=self._waiting,
            kind="session",
        )

    # --- session end ---------------------------------------------------------------------------------------------

    def _fail(self, problem: str) -> None:
        self._conclude(Failure(rank=None, reason=Reason.START_FAILED, at_ns=self._clock.boottime_ns(), detail=problem))

    def _end(self, sentence: str) -> None:
        """End the session after the current iteration of the event loop.

        The session still verifies devices that a run returned in the same iteration.
        """
        if self._ending is not None:
            return
        self._ending = sentence
        self._leave_by_ns = self._clock.boottime_ns() + int(_LEAVING_S * 1e9)
        if sentence:
            self._audience.tell(protocol.WaitingNote(sentence=sentence))
            self._account.notes.append(sentence)

    def _conclude(self, failure: Failure | None) -> None:
        """Report the session's end, release the verified idle devices and send the receipt."""
        reason = failure.reason if failure else (Reason.CANCELLED if self._book is None else Reason.COMPLETED)
        state = MEANINGS[reason].state
        idle = self._book.idle if self._book is not None else ()
        for run_id, devices in self._book.loans.items() if self._book is not None else ():
            self._account.notes.append(f"run {run_id} still uses {len(devices)} of the session's devices")
        self._account.mark("stopping")
        stopped = protocol.Stopped(state=state, reason=reason, cause=failure, consequences=())
        write_json(self._directory / "stopped.json", stopped)
        self._audience.tell(stopped)
        self._account.mark("exited")
        verdicts, unfit = self._verified(idle, self._launch.run_id, GatePolicy())
        all_lent = self._book is not None and not idle
        self._account.mark("freed")
        if self._billed:
            self._account.fact(FactKind.FREED, self._billed)
        if self._reservation is not None:
            self._reservation.close()
        attempt = Attempt(
            run_id=self._launch.run_id,
            fence=self._launch.fence,
            world_size=len(idle),
            limits=self._launch.spec.limits(),
            state=state,
            reason=reason,
        )
        gate = "runs of the session still use all devices and release them at their end" if all_lent else ""
        self._audience.tell(protocol.Finished(receipt=self._account.receipt(attempt, idle, verdicts, unfit, gate)))
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._audience.drain()
        self._audience.close()
        self._done = True
