"""What is measured, with its bar: each row starts its contestants, lets them take turns, and judges.

Bars are on medians. `quick` takes few rounds: enough to see that everything works, too few to quote.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks import (
    charges,
    commands,
    decisions,
    environments,
    isolation_rows,
    pages,
    pool_rows,
    ray_rows,
    remote_rows,
    replays,
    run_lists,
    shares,
    tracking_rows,
    usage,
)
from benchmarks.contestants import ContestantFailed
from benchmarks.databases import THREADS, WRITES
from benchmarks.load import rows as load_rows
from benchmarks.report import Row
from benchmarks.stage import Stage
from benchmarks.submissions import SUBMISSIONS
from benchmarks.submissions import THREADS as CLIENTS

WARM_RATIO_MAX = 2.0
BACK_TO_BACK_RATIO_MAX = 1.5
WARM_SNAPSHOT_RATIO_MAX = 1.5
_CAPTURED_S_MAX = 600.0  # the first round captures and restores everything that is installed
COLD_RATIO_MAX = 1.3
KILLED_MS_MAX = 100.0
CANCEL_MS_MAX = 200.0
TENSOR_FASTER_MIN = 3.0
IMPORT_MS_MAX = 60.0
FLOOD_RATIO_MAX = 2.0
FLOOD_MB_MAX = 100.0
SUBMISSIONS_PER_S_MIN = 300.0


def warm(quick: bool) -> Row:
    """Call until both ranks are in the process group, against a bare fork and the launchers people use."""
    launchers = ("neighbours.torchrun", "neighbours.torchrunx", "neighbours.accelerate")
    labels = (
        "bare fork + gloo",
        "`torchrun --standalone`",
        "torchrunx",
        "accelerate `notebook_launcher`",
    )
    with Stage(("ours.warm", "neighbours.bare_fork", *launchers), labels) as stage:
        stage.play(4 if quick else 24, slow=launchers)
        ours = stage.timing(0, "call → process group ready")
        against = stage.against()
        ratio = ours.median / stage.timing(1, labels[0]).median
        also = [
            stage.timing(0, "ours, call → last rank in the function", "enter_ms"),
            stage.timing(0, "ours, call → results in the caller", "returned_ms"),
            stage.timing(1, "bare fork, until both children were reaped (they end at once)", "returned_ms"),
        ]
        if len(against) == len(labels):
            also.append(stage.timing(4, "accelerate, until it returned", "returned_ms"))
        return Row(
            name="warm: call → process group ready, 2 ranks",
            ours=ours,
            against=against,
            bar=f"≤ {WARM_RATIO_MAX:g}× bare fork",
            met=ratio <= WARM_RATIO_MAX,
            also=tuple(also),
            problems=stage.problems(),
        )


def back_to_back(quick: bool) -> Row:
    """The warm row without a pause: nothing may stand by yet."""
    with Stage(("ours.warm", "neighbours.bare_fork"), ("bare fork + gloo",)) as stage:
        stage.play(4 if quick else 24, pause_s=0.0)
        ours, against = stage.timing(0, "call → process group ready"), stage.against()
        return Row(
            name="warm, calls without a pause between them",
            ours=ours,
            against=against,
            bar=f"≤ {BACK_TO_BACK_RATIO_MAX:g}× bare fork",
            met=ours.median <= BACK_TO_BACK_RATIO_MAX * against[0].median,
            problems=stage.problems(),
        )


def warm_snapshot(quick: bool) -> Row:
    """The warm row in a restored environment, against the caller's own, in the same rounds.

    A call takes longer by the gate (the project's directories and files) and by one question to the watches.
    """
    with Stage(
        ("ours.warm_snapshot", "ours.warm"), ("ours, in the caller's environment",), round_s_max=_CAPTURED_S_MAX
    ) as stage:
        stage.play(4 if quick else 24)
        ours, against = stage.timing(0, "call → process group ready"), stage.against()
        restored = stage.timing(0, "stem ready and environment confirmed → ranks started", "start_ms")
        live = stage.timing(1, "the same in the caller's environment", "start_ms")
        return Row(
            name="warm-snapshot: the warm row in a restored environment",
            ours=ours,
            against=against,
            bar=f"≤ {WARM_SNAPSHOT_RATIO_MAX:g}× the caller's environment",
            met=ours.median <= WARM_SNAPSHOT_RATIO_MAX * against[0].median,
            also=(restored, live),
            problems=stage.problems(),
        )


def in_session(quick: bool) -> Row:
    """The warm row in a held session, against the same fork; the session holds both CPU slots, so no other call can."""
    with Stage(("ours.in_session", "neighbours.bare_fork"), ("bare fork + gloo",)) as stage:
        stage.play(4 if quick else 24)
        return Row(
            name="warm, in a held session",
            ours=stage.timing(0, "call → process group ready"),
            against=stage.against(),
            problems=stage.problems(),
        )


def cold(quick: bool) -> Row:
    """Call until user code runs when nothing stands by, not even the agent."""
    with Stage(("ours.cold", "neighbours.import_torch"), ('`python -c "import torch, torch.distributed"`',)) as stage:
        stage.play(3 if quick else 12)
        ours = stage.timing(0, "call → first line of user code")
        command = stage.timing(1, '`python -c "import torch, torch.distributed"`')
        imported = stage.timing(1, "the same, until it has imported", "imported_ms")
        return Row(
            name="cold: no agent, no zygote; call → first line",
            ours=ours,
            against=(command, imported),
            bar=f"≤ {COLD_RATIO_MAX:g}× the command",
            met=ours.median <= COLD_RATIO_MAX * command.median,
            problems=stage.problems(),
        )


def killed(quick: bool) -> Row:
    """SIGKILL of rank 1 while rank 0 sleeps, until the caller has the exception."""
    return _killed("sleeper", "sleeps", quick)


def killed_in_collective(quick: bool) -> Row:
    """SIGKILL of rank 1 while rank 0 waits for it, until the caller has the exception."""
    return _killed("collective", "waits in a collective", quick)


def _killed(beside: str, what: str, quick: bool) -> Row:
    names = (f"ours.killed_beside_{beside}", f"neighbours.torchrun_killed_beside_{beside}")
    with Stage(names, ("torchrun, until it has ended",)) as stage:
        stage.play(2 if quick else 10)
        ours = stage.timing(0, "SIGKILL → exception in the caller")
        return Row(
            name=f"rank 1 killed while rank 0 {what} → exception",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {KILLED_MS_MAX:.0f} ms + grace used (counted as 0: SIGTERM is heeded)",
            met=ours.median <= KILLED_MS_MAX,
            value=f"{ours.median:.0f} ms",
            problems=stage.problems(),
        )


def cancel(quick: bool) -> Row:
    """`run.cancel()` until the receipt says that the devices are verified free."""
    names = ("ours.cancel", "neighbours.torchrun_stopped")
    with Stage(names, ("SIGTERM to torchrun, until it has ended",)) as stage:
        stage.play(2 if quick else 10)
        ours = stage.timing(0, "cancel → gate passed")
        return Row(
            name="cancel → gate passed, 2 declared GPUs",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {CANCEL_MS_MAX:.0f} ms",
            met=ours.median <= CANCEL_MS_MAX,
            value=f"{ours.median:.0f} ms",
            problems=stage.problems(),
        )


def tensor(quick: bool) -> Row:
    """A function returns a tensor of 1 GB, against pickle to a file and back."""
    with Stage(("ours.tensor", "neighbours.pickled_tensor"), ("pickle to a file and back",)) as stage:
        return _tensor(stage, "1 GB tensor returned: in the rank → in the caller's hands, read once", 2 if quick else 7)


def payload(quick: bool) -> Row:
    """The same without processes: the payload room against pickle."""
    with Stage(("ours.payload_tensor", "neighbours.pickle_tensor"), ("pickle.dump + pickle.load",)) as stage:
        return _tensor(stage, "1 GB tensor dumped, loaded and read once in one process", 2 if quick else 7)


def _tensor(stage: Stage, name: str, rounds: int) -> Row:
    stage.play(rounds)
    ours, theirs = (
        stage.timing(0, "ours", "read_ms"),
        stage.timing(1, "pickle to a file and back, read once", "read_ms"),
    )
    faster = theirs.median / ours.median
    return Row(
        name=name,
        ours=ours,
        against=(theirs,),
        bar=f"≥ {TENSOR_FASTER_MIN:g}× faster",
        met=faster >= TENSOR_FASTER_MIN,
        value=f"{faster:.1f}× faster",
        also=(
            stage.timing(0, "ours, not read yet (pages come when they are touched)"),
            stage.timing(1, "pickle, not read yet"),
        ),
        problems=stage.problems(),
    )


def imports(quick: bool) -> Row:
    """`import serverless_gpu` over an interpreter that does nothing."""
    with Stage(("neighbours.imports",), ()) as stage:
        stage.play(4 if quick else 30, pause_s=0.05)
        package = stage.timing(0, '`python -c "import serverless_gpu"`', "package_ms")
        nothing = stage.timing(0, "`python -c pass`", "pass_ms")
        more_ms = stage.timing(0, "difference").median
        return Row(
            name="import: `import serverless_gpu`",
            ours=package,
            against=(nothing,),
            bar=f"≤ {IMPORT_MS_MAX:.0f} ms more",
            met=more_ms <= IMPORT_MS_MAX,
            value=f"{more_ms:.1f} ms more",
            also=(stage.timing(0, "`from serverless_gpu import distributed`", "decorator_ms"),),
            problems=stage.problems(),
        )


def flood(quick: bool) -> Row:
    """One rank writes 4 GiB as fast as it can, another a line now and then, which is shown live."""
    with Stage(("ours.flood", "neighbours.drained_pipe"), ("a pipe read by Python into /dev/null",)) as stage:
        stage.play(2 if quick else 10)
        ours = stage.timing(0, "rank 0: first byte → last byte written")
        pipe = stage.timing(1, "a pipe read by Python into /dev/null")
        memory_mb = max(stage.timing(0, "", "supervisor_mb").values)
        rate, raw = (stage.timing(index, "", "gb_per_s").median for index in (0, 1))
        return Row(
            name="log flood: a rank writes 4 GiB",
            ours=ours,
            against=(pipe,),
            bar=f"≤ {FLOOD_RATIO_MAX:g}× the pipe, supervisor ≤ {FLOOD_MB_MAX:.0f} MB",
            met=ours.median <= FLOOD_RATIO_MAX * pipe.median and memory_mb <= FLOOD_MB_MAX,
            value=f"{rate:.1f} GB/s against {raw:.1f}, supervisor {memory_mb:.0f} MB",
            also=(stage.timing(0, "rank 1 writes a line → the caller has it, worst of a round", "late_ms"),),
            problems=stage.problems(),
        )


def _writes(kind: str, neighbour: str, quick: bool) -> Row:
    """Write small transactions from many threads, each durable when it returns."""
    with Stage((f"databases.ours_{kind}", f"databases.raw_{kind}"), (neighbour,)) as stage:
        stage.play(3 if quick else 12)
        ours = stage.timing(0, f"{WRITES} writes from {THREADS} threads")
        rates = [1000 * WRITES / timing.median for timing in (ours, *stage.against())]
        return Row(
            name=f"writes of the server, {kind}",
            ours=ours,
            against=stage.against(),
            value=" against ".join(f"{rate:,.0f}/s" for rate in rates),
            problems=stage.problems(),
        )


def _submissions(kind: str, quick: bool) -> Row:
    """Ask a served server for runs, from many threads, against the rows alone."""
    with Stage((f"submissions.{kind}", f"databases.raw_{kind}"), ("the driver, twice as many, rows only",)) as stage:
        stage.play(3 if quick else 12)
        ours = stage.timing(0, f"{SUBMISSIONS} submissions over HTTP from {CLIENTS} threads")
        return Row(
            name=f"submissions, {kind}",
            ours=ours,
            against=stage.against(),
            bar=f"≥ {SUBMISSIONS_PER_S_MIN:.0f}/s",
            met=1000 * SUBMISSIONS / ours.median >= SUBMISSIONS_PER_S_MIN,
            value=f"{1000 * SUBMISSIONS / ours.median:,.0f}/s",
            also=(stage.timing(0, "one of them: request → durable and answered", "one_ms"),),
            problems=stage.problems(),
        )


def submissions_sqlite(quick: bool) -> Row:
    """With what `sgpu up` has without options."""
    return _submissions("sqlite", quick)


def submissions_postgresql(quick: bool) -> Row:
    """With a PostgreSQL that waits for its disk."""
    return _submissions("postgresql", quick)


def writes_sqlite(quick: bool) -> Row:
    """Against the driver with one commit each."""
    return _writes("sqlite", "`sqlite3`, one after another", quick)


def writes_postgresql(quick: bool) -> Row:
    """Against the driver with a connection per thread."""
    return _writes("postgresql", "psycopg, a connection per thread", quick)


ROWS: dict[str, Callable[[bool], Row]] = {
    "warm": warm,
    "warm-snapshot": warm_snapshot,
    "back-to-back": back_to_back,
    "session": in_session,
    "cold": cold,
    "killed": killed,
    "killed-in-collective": killed_in_collective,
    "cancel": cancel,
    "tensor": tensor,
    "payload": payload,
    "import": imports,
    "log-flood": flood,
    "writes-sqlite": writes_sqlite,
    "writes-postgresql": writes_postgresql,
    "submissions-sqlite": submissions_sqlite,
    "submissions-postgresql": submissions_postgresql,
    **commands.ROWS,
    **remote_rows.ROWS,
    **isolation_rows.ROWS,
    **environments.ROWS,
    **tracking_rows.ROWS,
    **ray_rows.ROWS,
    **pool_rows.ROWS,
    **replays.ROWS,
    **shares.ROWS,
    **charges.ROWS,
    **decisions.ROWS,
    **usage.ROWS,
    **run_lists.ROWS,
    **pages.ROWS,
    **load_rows.ROWS,
}


def measure(name: str, quick: bool) -> Row:
    """Measure one row, with the load average around it.

    Raises:
        ContestantFailed: ours, or the neighbour the bar is about, could not be measured.
    """
    before = os.getloadavg()[0]
    row = ROWS[name](quick)
    if not row.against:
        raise ContestantFailed("; ".join(row.problems) or "there is nothing to compare with")
    return Row(**{**vars(row), "load": (round(before, 2), round(os.getloadavg()[0], 2))})
