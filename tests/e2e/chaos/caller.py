"""A client: it calls, cancels, preempts, and writes down what it was told. Killed and started again, it goes on.

    python -m tests.e2e.chaos.caller SEED CLIENT WHERE      in a project that has nothing else of the tests

Its journal has a line of JSON for each: `{"call", "run"}` once the server has accepted it, `{"call", "outcome", …}`
when the call has returned or raised. A call without an outcome is taken up again by its run; one without a run is the
server's to know by its tag. It ends once the file ``enough`` is there and all of its runs have an outcome.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from serverless_gpu import Run, attach, distributed
from serverless_gpu.errors import ServerlessGpuError
from tests.e2e.chaos import plan
from tests.e2e.chaos.work import work

AT_ONCE = 2
"""Calls of a client that go on at the same time."""


class Journal:
    """The lines of a client, of this process and of those before it that were killed."""

    def __init__(self, path: Path) -> None:
        lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        self.runs = {line["call"]: line["run"] for line in lines if "run" in line}
        self.done = {line["call"] for line in lines if "outcome" in line}
        self.begun = {line["call"] for line in lines}
        if path.exists():  # a client killed in the middle of a line has not said it
            whole = "".join(f"{json.dumps(line)}\n" for line in lines)
            path.write_text(whole)
        self._file = path.open("a")
        self._lock = threading.Lock()

    def write(self, **line: Any) -> None:
        """Write a line down."""
        with self._lock:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def main(seed: int, client: int, where: Path) -> None:
    """Call until it is enough."""
    journal = Journal(where / f"client{client}.jsonl")
    free = threading.Semaphore(AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for call in plan.calls(seed, client):
            if call.number in journal.done or (call.number in journal.begun and call.number not in journal.runs):
                continue
            resumed = journal.runs.get(call.number)
            free.acquire()
            if (where / "enough").exists() and resumed is None:
                if call.number > max(journal.runs, default=-1):
                    break
                free.release()
                continue
            if resumed is None:
                journal.write(call=call.number, asked=time.clock_gettime_ns(time.CLOCK_BOOTTIME))
            task = threads.submit(_called, journal, call, plan.name_of(client, call), where, resumed)
            task.add_done_callback(lambda _: free.release())


def _called(journal: Journal, call: plan.Call, name: str, where: Path, resumed: str | None) -> None:
    try:
        run: Run[Any] = attach(resumed) if resumed is not None else _submit(call, name, where)
        if resumed is None:
            journal.write(call=call.number, run=run.id)
            _act(call, run)
        results = run.results()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this client was told
        reason = getattr(error, "reason", None)
        journal.write(
            call=call.number, outcome=type(error).__name__, reason=reason and str(reason), message=str(error)[:500]
        )
        return
    wanted = [(name, rank) for rank in range(call.gpus)]
    outcome = "value" if [tuple(result) for result in results] == wanted else "wrong value"
    journal.write(call=call.number, outcome=outcome, reason=None, message="")


def _submit(call: plan.Call, name: str, where: Path) -> Run[Any]:
    options: dict[str, Any] = {
        "gpus": call.gpus,
        "gpu_type": "H100",
        "tags": {"call": name},
        "retries": plan.RETRIES.get(call.kind, 0),
        "resume": call.kind in plan.RESUMES,
        "priority": {"urgent": "CRITICAL", "resume": "BEST_EFFORT"}.get(call.kind, "NORMAL"),
        "grace": 2,
        "timeout": 60,
        "quiet": True,
    }
    function = distributed(remote=True, env="snapshot", **options)(work)
    return function.submit(str(where / "signs"), name, call.kind, call.seconds)


def _act(call: plan.Call, run: Run[Any]) -> None:
    if call.kind not in ("cancel", "preempt"):
        return
    threading.Event().wait(call.after_s)
    with contextlib.suppress(ServerlessGpuError):  # it has ended already
        run.cancel() if call.kind == "cancel" else run.preempt()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
