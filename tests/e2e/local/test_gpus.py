"""Choosing GPUs, waiting for them, and sharing them with others: on declared fakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.errors import GpuTypeMismatch, InvalidValue, NoGpu, NotEnoughGpus, UnknownGpuType
from serverless_gpu.testing import FakeGpus
from tests.support.golden import golden
from tests.support.local.observe import announced, ended, held_locks, run_directories, start_script, wait_for
from tests.support.local.ranks import stay

MIB = 1 << 20


def visible() -> list[str | None]:
    """Return what a rank sees."""
    return [
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        os.environ.get("CUDA_DEVICE_ORDER"),
        os.environ["LOCAL_RANK"],
        os.environ["SGPU_GPU_UUIDS"],
    ]


# --- which GPUs -------------------------------------------------------------------------------------------------------


def test_every_rank_sees_all_gpus_of_the_run_in_local_rank_order(warm: Path) -> None:
    first, second = distributed(gpus=2, quiet=True)(visible).distributed()
    assert first == ["0,1", "PCI_BUS_ID", "0", "FAKE-H100-0,FAKE-H100-1"]
    assert second == ["0,1", "PCI_BUS_ID", "1", "FAKE-H100-0,FAKE-H100-1"]


def test_the_callers_own_restriction_is_kept_with_its_order(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,2,7")
    found = distributed(gpus=2, quiet=True)(visible).distributed()
    assert found[0] == ["5,2", "PCI_BUS_ID", "0", "FAKE-H100-5,FAKE-H100-2"]
    assert distributed(quiet=True)(rt.get_world_size).distributed() == [3, 3, 3]
    with pytest.raises(NotEnoughGpus):
        distributed(gpus=4)(visible).distributed()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "FAKE-H100-6")
    assert distributed(gpus=1, quiet=True)(visible).distributed()[0][0] == "6"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoGpu):
        distributed(gpus=1)(visible).distributed()


def test_a_cpu_slot_sees_no_gpu(warm: Path) -> None:
    assert distributed(gpus=1, gpu_type="cpu", quiet=True)(visible).distributed()[0][0] == ""


def test_several_types_must_be_told_apart(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100:2,A10:2")
    with pytest.raises(InvalidValue, match=r"(?s)A10.*H100|H100.*A10"):
        distributed(gpus=1)(visible).distributed()
    assert distributed(gpus=2, gpu_type="a10", quiet=True)(visible).distributed()[0][3] == "FAKE-A10-0,FAKE-A10-1"
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "A100-80:2")
    run = distributed(gpu_type="A100", quiet=True)(rt.get_world_size)
    assert run.distributed() == [2, 2], "A100 is a family"


def test_own_types_come_from_the_configuration(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "config.toml").write_text("[types.MYCARD]\nmemory_gib = 48\n[prices]\nMYCARD = 3.6\n")
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "MYCARD:2")
    run = distributed(gpus=2, gpu_type="mycard", quiet=True)(rt.get_global_rank).submit()
    assert run.results(timeout=50) == [0, 1]
    receipt = run.receipt(timeout=50)
    assert receipt.gpu_type == "MYCARD"
    assert receipt.micros is not None and receipt.micros == -(-receipt.gpu_ms * 3_600_000 // 3_600_000)


# --- what is not there ------------------------------------------------------------------------------------------------


def test_a_wrong_type_says_what_is_there(warm: Path) -> None:
    with pytest.raises(GpuTypeMismatch, match=r"(?s)A10.*H100|H100.*A10"):
        distributed(gpus=1, gpu_type="A10")(visible).distributed()


def test_too_many_says_how_many_there_are(warm: Path) -> None:
    with pytest.raises(NotEnoughGpus, match=r"(?s)9 .*8|8 .*9"):
        distributed(gpus=9)(visible).distributed()


def test_an_unknown_type_lists_the_known_ones(warm: Path) -> None:
    with pytest.raises(UnknownGpuType, match="H100"):
        distributed(gpus=1, gpu_type="H10O")


def test_no_gpu_says_how_to_go_on_without_one(home: Path) -> None:
    if list(Path("/proc/driver").glob("nvidia/gpus/*")):
        pytest.skip("this machine has a GPU")
    with pytest.raises(NoGpu) as caught:
        distributed()(visible).distributed()
    assert 'gpu_type="CPU"' in caught.value.hint and "SERVERLESS_GPU_FAKE" in caught.value.hint
    assert run_directories(home) == []
    with pytest.raises((NoGpu, GpuTypeMismatch), match="H100"):
        distributed(gpus=8, gpu_type="H100")(visible).distributed()


def test_a_fake_that_does_not_read_like_one_says_how(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERLESS_GPU_FAKE", "H100=8")
    with pytest.raises(InvalidValue, match="H100:8"):
        distributed(gpus=1)(visible).distributed()


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_run_waits_and_says_who_holds_the_gpus(warm: Path, where: str, tmp_path: Path) -> None:
    holder = distributed(gpus=7, quiet=True)(stay).submit(where)
    announced(Path(where), "rank6")
    path = tmp_path / "waiter.py"
    path.write_text("from serverless_gpu import distributed\nprint(distributed(gpus=2)(len).distributed('abc'))\n")
    waiter = start_script(path)
    try:
        assert waiter.stderr is not None
        sentence = waiter.stderr.readline()
    finally:
        Path(where, "go").touch()
    assert "waiting for 2 H100" in sentence and holder.id in sentence and golden("local.gpus.more-held-run") in sentence
    code, out, err = ended(waiter)
    assert (code, out) == (0, "[3, 3]\n"), err
    assert holder.results(timeout=50) == list(range(7))


def test_two_runs_exclude_each_other_and_all_or_nothing_is_taken(warm: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    five = distributed(gpus=5, quiet=True)(stay)
    first = five.submit(str(places[0]))
    announced(places[0], "rank4")  # of two at once nobody can say which is first
    second = five.submit(str(places[1]))
    wait_for(second.waiting_for, "the second one has looked at what is free")
    assert second.status() == "QUEUED"
    taken = [f"FAKE-H100-{n}.lock" for n in range(5)]
    wait_for(
        lambda: [name for name in held_locks(warm) if name.endswith(".lock")] == taken, "it has taken none of that"
    )
    (places[0] / "go").touch()
    announced(places[1], "rank4")
    (places[1] / "go").touch()
    assert first.results(timeout=50) == second.results(timeout=50) == list(range(5))
    assert set(first.receipt(timeout=50).gpus) == set(second.receipt(timeout=50).gpus)


def test_runs_that_fit_beside_each_other_do_not_wait(warm: Path, tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("first", "second")]
    for place in places:
        place.mkdir()
    runs = [distributed(gpus=4, quiet=True)(stay).submit(str(place)) for place in places]
    for place in places:
        announced(place, "rank3")
    for place in places:
        (place / "go").touch()
    assert [run.results(timeout=50) for run in runs] == [[0, 1, 2, 3]] * 2
    assert not set(runs[0].receipt(timeout=50).gpus) & set(runs[1].receipt(timeout=50).gpus)


def test_who_came_first_goes_first(warm: Path, where: str, tmp_path: Path) -> None:
    holder = distributed(gpus=8, quiet=True)(stay).submit(where)
    announced(Path(where), "rank7")
    log = tmp_path / "order"

    def note(name: str) -> None:
        with log.open("a") as file:
            file.write(name)

    waiters = []
    for name in "abc":
        waiters.append(distributed(gpus=1, quiet=True)(note).submit(name))
        wait_for_tickets(warm, len(waiters))
    everything = distributed(gpus=8, quiet=True)(note).submit("D")
    wait_for_tickets(warm, 4)
    Path(where, "go").touch()
    assert holder.wait(50) and everything.wait(50) and all(run.wait(50) for run in waiters)
    text = log.read_text()
    assert sorted(text[:3]) == ["a", "b", "c"] and text[3:] == "D" * 8


def wait_for_tickets(home: Path, count: int) -> None:
    """Wait until so many runs stand in line."""
    wait_for(lambda: sum(name.endswith(".ticket") for name in held_locks(home)) == count, f"{count} stand in line")


# --- GPUs that others use ---------------------------------------------------------------------------------------------


def test_a_gpu_that_others_use_is_passed_over(own: Path) -> None:
    FakeGpus(own).set("FAKE-H100-0", memory_used_bytes=5000 * MIB, processes={4711: 5000 * MIB})
    assert distributed(gpus=2, quiet=True)(visible).distributed()[0][0] == "1,2"


def test_a_run_that_needs_a_busy_gpu_waits_and_lists_who_uses_it(own: Path, tmp_path: Path) -> None:
    gpus = FakeGpus(own)
    gpus.set("FAKE-H100-3", memory_used_bytes=5000 * MIB, processes={4711: 5000 * MIB})
    path = tmp_path / "waiter.py"
    path.write_text("from serverless_gpu import distributed\nprint(distributed()(len).distributed('abc'))\n")
    waiter = start_script(path)
    try:
        assert waiter.stderr is not None
        sentence = waiter.stderr.readline()
    finally:
        gpus.clear("FAKE-H100-3")
    assert "FAKE-H100-3" in sentence and "4711" in sentence and "4.9 GiB" in sentence
    code, out, err = ended(waiter)
    assert (code, out) == (0, f"{[3] * 8}\n"), err


def test_ignore_busy_takes_it_all_the_same(own: Path) -> None:
    FakeGpus(own).set("FAKE-H100-0", memory_used_bytes=5000 * MIB, processes={4711: 5000 * MIB})
    run = distributed(gpus=2, quiet=True, ignore_busy=True)(visible).submit()
    assert run.results(timeout=50)[0][0] == "0,1"
    assert run.receipt(timeout=50).quarantined == (), "what was there before is not the run's leftover"
