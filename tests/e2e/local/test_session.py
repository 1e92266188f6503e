"""A held session: devices and warmth stay from call to call, and go with the block, the idle limit, or their owner."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest

import serverless_gpu
from serverless_gpu import Run, attach, distributed
from serverless_gpu.errors import (
    InvalidOption,
    InvalidValue,
    NotDistributable,
    NotEnoughGpus,
    RunCancelled,
    RunError,
    SessionEnded,
    UsageError,
)
from serverless_gpu.model.billing.ledger import charge
from serverless_gpu.model.lifecycle.attempt import Fact, FactKind
from serverless_gpu.testing import FakeGpus
from tests.support.golden import golden
from tests.support.local.observe import (
    Process,
    agent,
    announced,
    ended,
    held_locks,
    nothing_of_a_run,
    run_sockets,
    start_script,
    supervisor,
    wait_for,
)
from tests.support.local.ranks import rank_number, stay
from tests.support.paths import REPOSITORY


def where_am_i(rank: int = -1, world_size: int = -1) -> tuple[int, int, str]:
    return rank, world_size, os.environ["SGPU_GPU_UUIDS"]


def fail() -> None:
    raise LookupError("own")


@distributed(gpus=1, gpu_type="H100", quiet=True)
def stay_on_one(where: str) -> int:
    return stay(where)


@distributed(gpus=2, gpu_type="H100", quiet=True)
def on_two() -> str:
    return os.environ["SGPU_GPU_UUIDS"]


def locks(*numbers: int) -> list[str]:
    return [f"FAKE-H100-{number}.lock" for number in numbers]


def test_calls_share_devices_and_a_warm_interpreter(warm: Path) -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        assert (session.devices, held_locks(warm)) == (("FAKE-H100-0", "FAKE-H100-1"), locks(0, 1))
        both = "FAKE-H100-0,FAKE-H100-1"
        assert session.distributed(where_am_i) == [(0, 2, both), (1, 2, both)]
        assert held_locks(warm) == locks(0, 1), "held between calls"
        run = session.submit(where_am_i)
        assert run.results() == [(0, 2, both), (1, 2, both)]
        receipt = run.receipt()
        assert (receipt.warm, receipt.gate) == (
            True,
            golden("local.session.gpus-verified-free"),
        )
        with pytest.raises(LookupError, match="own"):
            session.distributed(fail)
        assert session.distributed(on_two) == [both, both]
    assert held_locks(warm) == []
    with pytest.raises(SessionEnded) as refused:
        session.distributed(where_am_i)
    assert str(refused.value) == golden("local.session.session-cannot-used", id=session.id)
    session.close()


def test_many_runs_share_the_devices_of_a_session(warm: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in "abc"]
    for place in places:
        place.mkdir()
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        runs = dict(zip(places, session.map(stay_on_one, [str(place) for place in places]), strict=True))
        waiting = wait_for(lambda: [place for place in places if runs[place].waiting_for()], "one waits")
        running = [place for place in places if place not in waiting]
        for place in running:
            announced(place, "rank0")
        assert len(waiting) == 1
        said = runs[waiting[0]].waiting_for().replace(runs[running[1]].id, runs[running[0]].id)
        has = f"run {runs[running[0]].id} has 1"
        assert said == golden("local.session.waiting-session-h100", has=has)
        (running[1] / "go").touch()
        announced(waiting[0], "rank0")
        for place in places:
            (place / "go").touch()
        assert [run.result() for run in runs.values()] == [0, 0, 0]


def test_the_account_of_a_session_is_the_time_no_run_had_its_devices(warm: Path, where: str) -> None:
    session = serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True)
    run = session.submit(stay_on_one, where)
    announced(Path(where), "rank0")
    Path(where, "go").touch()
    session.close()
    directory = warm / "runs" / session.id / "1"
    receipt = json.loads((directory / "receipt.json").read_text())
    assert (receipt["runs"], receipt["state"], receipt["gpus"]) == (1, "SUCCEEDED", ["FAKE-H100-0", "FAKE-H100-1"])
    facts = [msgspec.json.decode(line, type=Fact) for line in (directory / "facts.jsonl").read_bytes().splitlines()]
    assert [(fact.kind, len(fact.gpus)) for fact in facts] == [
        (FactKind.RESERVED, 2),
        (FactKind.HELD, 2),
        (FactKind.FREED, 2),
        (FactKind.HELD, 1),
        (FactKind.FREED, 1),
        (FactKind.HELD, 2),
        (FactKind.FREED, 2),
    ]
    charged = charge(facts, gpu_type="H100")
    assert charged.gpu_ms == receipt["gpu_ms"] > 0
    assert run.receipt().gpu_ms > 0
    submission = json.loads((directory / "spec.json").read_text())
    assert (submission["kind"], submission["world_size"]) == ("session", 0)
    assert json.loads((run.directory / "spec.json").read_text())["session"] == session.id


def test_what_cannot_be_is_refused_before_anything_starts(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("SERVERLESS_GPU_FAKE", "H100:300")
        with pytest.raises(InvalidValue, match=re.escape(golden("local.session.session-holds-most"))):
            serverless_gpu.session()
    with pytest.raises(NotEnoughGpus):
        serverless_gpu.session(gpus=9, gpu_type="H100")
    with pytest.raises(UsageError, match=re.escape(golden("local.session.holds-devices-machine"))):
        serverless_gpu.session(gpus=1, gpu_type="H100", remote=True)  # type: ignore[call-arg]  # an option of `distributed`
    with pytest.raises(InvalidValue, match=re.escape(golden("local.session.idle-timeout-must"))):
        serverless_gpu.session(gpus=1, gpu_type="H100", idle_timeout=0)
    with pytest.raises(InvalidOption, match=re.escape(golden("local.session.option-idle"))):
        serverless_gpu.session(gpus=1, gpu_type="H100", idle=3)  # type: ignore[call-arg]  # the mistake under test
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as session:
        with pytest.raises(InvalidValue, match=golden("local.session.two-asks-h100", id=session.id)):
            session.distributed(on_two)
        with pytest.raises(NotDistributable):
            session.distributed(3)  # type: ignore[arg-type]  # the mistake under test
    wait_for(lambda: nothing_of_a_run(warm), "nothing was started")


def test_the_rest_of_the_machine_waits_by_name(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serverless_gpu.session(gpus=8, gpu_type="H100") as session:
        run = on_two.submit()
        wait_for(lambda: "held by session" in run.waiting_for(), "it knows who")
        names = "FAKE-H100-0, FAKE-H100-1, FAKE-H100-2, FAKE-H100-3 and 4 more"
        assert golden("local.session.held-session", names=names, id=session.id) in run.waiting_for()
    run.results()
    said = capsys.readouterr().err
    assert golden("local.session.serverless-gpu-session", id=session.id) in said


def test_an_exception_in_the_block_cancels_its_runs(warm: Path, where: str) -> None:
    runs: list[Run[int]] = []
    with pytest.raises(KeyError), serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        runs += session.map(stay_on_one, [where])
        announced(Path(where), "rank0")
        raise KeyError("own")
    assert (runs[0].status(), held_locks(warm)) == ("CANCELLED", [])


def test_an_idle_session_warns_and_gives_back(warm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = serverless_gpu.session(gpus=1, gpu_type="H100", idle_timeout=2)
    wait_for(lambda: "(ended)" in repr(session), "the session's own process has heard of it")
    assert held_locks(warm) == []
    with pytest.raises(SessionEnded, match=golden("local.session.session-idle-ended")):
        session.distributed(where_am_i)
    said = capsys.readouterr().err
    assert golden("local.session.gives-h100-back") in said and "the session ended after" in said
    session.close()


def test_a_forgotten_session_ends(warm: Path) -> None:
    session = serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True)
    assert held_locks(warm) == locks(0)
    del session
    wait_for(lambda: nothing_of_a_run(warm), "nothing is held")


def test_a_session_can_be_ended_from_elsewhere(warm: Path) -> None:
    session = serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True)
    other = attach(session.id)
    assert other.status() == "RUNNING"
    other.cancel()
    assert other.wait(50)
    assert (other.status(), other.receipt(50).runs, held_locks(warm)) == ("SUCCEEDED", 0, [])
    wait_for(lambda: "ended" in repr(session), "its owner knows")
    with pytest.raises(SessionEnded):
        session.submit(where_am_i)


# --- deaths ----------------------------------------------------------------------------------------------------------

OWNER = """
import sys, serverless_gpu
from tests.support.local.ranks import announce, stay
where = sys.argv[1]
session = serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True)
run = session.submit(stay, where) if len(sys.argv) > 2 else None
announce(where, "owner." + session.id)
session.distributed(stay, where)
"""


def owner_script(tmp_path: Path) -> Path:
    path = tmp_path / "owner.py"
    root = str(REPOSITORY)
    path.write_text(f"import sys; sys.path.insert(0, {root!r})\n{textwrap.dedent(OWNER)}")
    return path


def test_F62_a_killed_owner_ends_its_session_and_not_its_run(warm: Path, tmp_path: Path, where: str) -> None:
    process = start_script(owner_script(tmp_path), where)
    announced(Path(where), "rank0")
    announced(Path(where), "rank1")
    process.kill()
    ended(process)
    session_id = next(path.suffix[1:] for path in Path(where).glob("owner.0*"))
    wait_for(lambda: f"{session_id}.sock" not in run_sockets(warm), "the session is gone")
    assert held_locks(warm) == locks(0, 1), "its run goes on and keeps its devices"
    (run_id,) = (name.removesuffix(".sock") for name in run_sockets(warm))
    Path(where, "go").touch()
    assert attach(run_id).results(50) == [0, 1]
    wait_for(lambda: held_locks(warm) == [], "the devices are free with the end of the run")
    receipt = json.loads((warm / "runs" / session_id / "1" / "receipt.json").read_text())
    assert receipt["notes"] == [
        golden("local.session.owner-gone"),
        golden("local.session.run-still-uses", run_id=run_id),
    ]


def test_F61_ctrl_c_in_a_call_gives_everything_back(warm: Path, tmp_path: Path, where: str) -> None:
    process = start_script(owner_script(tmp_path), where)
    announced(Path(where), "rank1")
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code != 0 and err.rstrip().endswith("KeyboardInterrupt")
    wait_for(lambda: nothing_of_a_run(warm), "nothing is held")


# A session whose block or call is interrupted, in the ways a person does it.
INTERRUPTED = """
import os, sys, serverless_gpu
from tests.support.local.ranks import ignore_sigterm, stay
where, what = sys.argv[1:]
options = {"on_interrupt": "detach"} if what == "detach" else {"grace": 60.0}
with serverless_gpu.session(gpus=2, gpu_type="H100", **options) as session:
    if what == "exit":
        run = session.submit(stay, where)
    elif what == "results":
        session.submit(stay, where).results()
    else:
        session.distributed(ignore_sigterm if what == "ignore" else stay, where)
"""


def interrupted(tmp_path: Path, what: str) -> tuple[subprocess.Popen[str], list[Process]]:
    path = tmp_path / "owner.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{INTERRUPTED}")
    process = start_script(path, str(tmp_path), what)
    ranks = [announced(tmp_path, f"rank{number}")[0] for number in (0, 1)]
    process.send_signal(signal.SIGINT)
    return process, ranks


@pytest.mark.parametrize("what", ["exit", "results"])
def test_F61_ctrl_c_at_the_end_of_a_session_or_in_a_wait_cancels_its_runs_and_says_so(
    own: Path, tmp_path: Path, what: str
) -> None:
    process, ranks = interrupted(tmp_path, what)
    _, _, err = ended(process)
    assert golden("local.session.cancelling-run-press") in err
    assert (golden("local.session.goes-while-session") in err) == (what == "results")
    assert err.count('File "') <= 4, "frames of the user's and one or two of ours"
    assert not any(rank.alive() for rank in ranks)
    wait_for(lambda: nothing_of_a_run(own), "nothing is held")


def test_F61_a_run_that_is_to_be_detached_outlives_its_session(own: Path, tmp_path: Path) -> None:
    process, ranks = interrupted(tmp_path, "detach")
    _, _, err = ended(process)
    (run_id,) = re.findall(r"find it again with serverless_gpu\.attach\('(\w+)'\)", err)
    assert golden("local.session.runs-all-devices") in err
    assert all(rank.alive() for rank in ranks)
    (tmp_path / "go").touch()
    assert attach(run_id).results(50) == [0, 1]


def test_F61_a_second_ctrl_c_leaves_a_session_at_once(own: Path, tmp_path: Path) -> None:
    process, ranks = interrupted(tmp_path, "ignore")
    assert process.stderr is not None
    for line in process.stderr:
        if "press Ctrl-C again" in line:
            break
    process.send_signal(signal.SIGINT)
    _, _, err = ended(process, 40)  # its grace is 60 s
    assert golden("local.session.still-being-cancelled") in err
    for rank in ranks:
        rank.send(signal.SIGKILL)  # instead of a minute's grace
    wait_for(lambda: nothing_of_a_run(own), "nothing is held")


def test_a_forked_child_of_the_owner_does_not_end_its_session(warm: Path, tmp_path: Path) -> None:
    path = tmp_path / "forks.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, sys, serverless_gpu
            with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as session:
                if os.fork() == 0:
                    sys.exit(0)
                os.wait()
                print(session.distributed(os.getppid) != [])
            """
        )
    )
    process = start_script(path)
    assert ended(process) == (0, "True\n", "")


def test_F61_ctrl_c_while_waiting_for_devices_holds_nothing(warm: Path, tmp_path: Path, where: str) -> None:
    script = tmp_path / "second.py"
    script.write_text("import serverless_gpu\nserverless_gpu.session(gpus=8, gpu_type='H100')\n")
    with serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True) as session:
        process = start_script(script)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"serverless-gpu: waiting for 8 H100: FAKE-H100-0 is held by session {session.id} of ")
        process.send_signal(signal.SIGINT)
        assert golden("local.session.waiting-any-more") in ended(process)[2]
        wait_for(lambda: len(run_sockets(warm)) == 1, "only the first session is left")
        wait_for(lambda: held_locks(warm) == locks(0), "its ticket is gone, too")


def test_a_killed_supervisor_gives_its_devices_back_to_the_session(own: Path, where: str) -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        run = session.submit(stay, where)
        announced(Path(where), "rank1")
        supervisor(own, run.id).kill()
        with pytest.raises(RunError, match="supervisor process died"):
            run.results(50)
        assert session.distributed(rank_number) == [0, 1]


def test_a_killed_session_process_is_said_and_holds_nothing(own: Path, where: str) -> None:
    session = serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True)
    run = session.submit(stay_on_one, where)
    announced(Path(where), "rank0")
    supervisor(own, session.id).kill()
    wait_for(lambda: held_locks(own) == locks(0), "only the run's device is held")
    wait_for(lambda: "ended" in repr(session), "its owner knows")
    with pytest.raises(SessionEnded, match=re.escape(golden("local.session.process-gone"))):
        session.distributed(rank_number)
    Path(where, "go").touch()
    assert run.results(50) == [0]
    wait_for(lambda: held_locks(own) == [], "everything is free")
    session.close()


def test_a_session_survives_its_agent(own: Path) -> None:
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        assert session.distributed(rank_number) == [0, 1]
        agent(own).kill()
        assert session.distributed(rank_number) == [0, 1]
        assert held_locks(own) == locks(0, 1)


def test_F11_a_device_that_is_not_clean_is_not_lent_again_until_it_is(own: Path, where: str) -> None:
    fakes = FakeGpus(own)
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        first = session.submit(stay, where)
        announced(Path(where), "rank1")
        fakes.set("FAKE-H100-1", memory_used_bytes=4 << 30)
        Path(where, "go").touch()
        assert first.results() == [0, 1]
        assert first.receipt(50).quarantined == ("FAKE-H100-1",)
        second = session.submit(rank_number)
        wait_for(second.waiting_for, "it waits")
        assert second.waiting_for() == golden("local.session.waiting-session-h100-fake")
        fakes.clear("FAKE-H100-1")
        assert second.results(50) == [0, 1]


def test_a_session_takes_what_fits_it_and_says_what_does_not(warm: Path) -> None:
    with serverless_gpu.session(gpus=1, gpu_type="CPU", quiet=True) as session:
        assert session.distributed(distributed(gpus=1, quiet=True)(rank_number)) == [0], "of the type that is there"
        with pytest.raises(InvalidValue) as refused:
            session.distributed(on_two)
    assert str(refused.value) == golden("local.session.two-asks-h100-session", id=session.id)


def test_no_device_is_in_two_accounts_at_once(warm: Path, where: str) -> None:
    Path(where, "go").touch()
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        runs = session.map(stay_on_one, [where] * 6)
        for run in runs:
            run.receipt()
    held: dict[str, list[tuple[int, int]]] = {}
    for directory in [warm / "runs" / session.id / "1", *(run.directory for run in runs)]:
        started: dict[str, int] = {}
        for line in (directory / "facts.jsonl").read_bytes().splitlines():
            fact = msgspec.json.decode(line, type=Fact)
            for uuid in fact.gpus if fact.kind in (FactKind.HELD, FactKind.RESERVED, FactKind.FREED) else ():
                if fact.kind is FactKind.FREED:
                    held.setdefault(uuid, []).append((started.pop(uuid), fact.boottime_ns))
                else:
                    started[uuid] = fact.boottime_ns
    for spans in held.values():
        ordered = sorted(spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(ordered)), ordered


FORKING_OWNER = """
import os, sys, time, serverless_gpu
from tests.support.local.ranks import announce, stay
session = serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True)
runs = [session.submit(stay, sys.argv[1]) for _ in range(2)]
if os.fork() == 0:
    time.sleep(600)
announce(sys.argv[1], "owner." + session.id)
time.sleep(600)
"""


def test_F62_a_session_ends_with_its_owner_also_where_a_forked_child_of_that_lives(
    warm: Path, tmp_path: Path, where: str
) -> None:
    """Workers of a DataLoader, say: they have a copy of the session's socket."""
    path = tmp_path / "forks.py"
    path.write_text(f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})\n{FORKING_OWNER}")
    process = start_script(path, where)
    announced(Path(where), "rank0")
    announced_by = wait_for(lambda: list(Path(where).glob("owner.0*")), "the owner has forked")
    session_id = announced_by[0].suffix[1:]
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: f"{session_id}.sock" not in run_sockets(warm), "the session is gone")
    os.killpg(process.pid, signal.SIGKILL)  # the child, which is in the script's own session
    ended(process)
    runs = [attach(name) for name in os.listdir(warm / "runs") if belongs(warm, name, session_id)]
    Path(where, "go").touch()
    assert sorted(run.wait(50) and run.status() for run in runs) == ["CANCELLED", "SUCCEEDED"]
    waiting = next(run for run in runs if run.status() == "CANCELLED")
    with pytest.raises(RunCancelled, match=re.escape(golden("local.session.session-ended-before"))):
        waiting.results()


def belongs(home: Path, run_id: str, session_id: str) -> bool:
    return bool(json.loads((home / "runs" / run_id / "1" / "spec.json").read_text())["session"] == session_id)


def test_a_dirty_device_of_a_killed_run_does_not_hold_up_the_others(own: Path, where: str) -> None:
    fakes = FakeGpus(own)
    with serverless_gpu.session(gpus=2, gpu_type="H100", quiet=True) as session:
        run = session.submit(stay_on_one, where)
        announced(Path(where), "rank0")
        fakes.set("FAKE-H100-0", memory_used_bytes=4 << 30)
        supervisor(own, run.id).kill()
        assert session.distributed(distributed(gpus=1, quiet=True)(where_am_i)) == [(0, 1, "FAKE-H100-1")]
        fakes.clear("FAKE-H100-0")
        assert session.distributed(rank_number) == [0, 1]


def test_an_ended_session_is_not_entered_again(warm: Path) -> None:
    session = serverless_gpu.session(gpus=1, gpu_type="H100", quiet=True)
    session.close()
    with pytest.raises(SessionEnded, match="the caller closed the session"), session:
        raise AssertionError("not reached")
