"""Checks features that only a real GPU shows: `python -m scripts.gpu_check` (`make gpu-check`).

Without an NVIDIA GPU the program prints one line and exits with status 0. With one, it runs every check through
`@distributed(gpu_type=None)` in a temporary home. It prints the evidence and writes build/gpu-check.md. It exits with
status 1 if a check failed. It uses all GPUs of the machine for about a minute and allocates 1 GiB on each.

Failure cases: A check that raises or takes more than three minutes has failed, and the other checks still run. If torch
cannot use the GPUs, the program prints one line and exits with status 1. A check never passes without evidence.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from serverless_gpu import Receipt, Run, distributed
from serverless_gpu.model.hardware import Device
from serverless_gpu.model.placement import restrict
from serverless_gpu.node.devices.inventory import NvmlProvider
from serverless_gpu.node.monitor.sampler import NvmlSampler
from serverless_gpu.testing import agent_status, stop_agent
from serverless_gpu.version import __version__

R = TypeVar("R")

REPORT = Path("build/gpu-check.md")
LIMIT_S = 180.0
HELD_BYTES = 1 << 30
WARM_ROUNDS = 5
COLD_ROUNDS = 2

_HOLD = """\
import pathlib, sys, time, torch
held = torch.ones(int(sys.argv[2]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
pathlib.Path(sys.argv[1]).write_text("held")
time.sleep(600)
"""
_FIRST_KERNEL = "import torch; torch.ones(1, device='cuda'); torch.cuda.synchronize()"


class Failed(Exception):
    """A check failed; the text is the evidence."""


class Result(NamedTuple):
    """The outcome of one check."""

    name: str
    passed: bool
    evidence: str


class Machine(NamedTuple):
    """The home, NVML and GPUs that the checks use."""

    home: Path
    nvml: NvmlProvider
    gpus: tuple[Device, ...]


# --- functions that ranks run -----------------------------------------------------------------------------------------


def look_around() -> dict[str, object]:
    first_touch = not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no annotation there
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "uuids": [str(getattr(found, "uuid", "")) for found in properties],
        "named": os.environ["SGPU_GPU_UUIDS"],
        "first_touch": first_touch,
    }


def add_up() -> float:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    value = torch.full((1 << 20,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(value)
    result = float(value.min()), float(value.max())
    dist.destroy_process_group()
    if result[0] != result[1]:
        raise ValueError(f"all_reduce returned both {result[0]} and {result[1]} in one tensor")
    return result[0]


def hold_memory(directory: str, count: int) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    held = torch.ones(count, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    (Path(directory) / f"held-{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(600)
    del held


def leave_child_behind(directory: str, program: str, count: int) -> int:
    """Start a CUDA process in a new session, through a parent that exits at once. Return its pid."""
    held = Path(directory) / "child-held"
    hold = [sys.executable, "-c", program, str(held), str(count)]
    starter = (
        "import subprocess, sys; "
        "print(subprocess.Popen(sys.argv[1:], start_new_session=True, stdout=subprocess.DEVNULL).pid)"
    )
    printed = subprocess.run([sys.executable, "-c", starter, *hold], check=True, stdout=subprocess.PIPE).stdout
    while not held.exists():
        os.kill(int(printed), 0)  # Raises ProcessLookupError if the process has ended.
        time.sleep(0.05)
    return int(printed)


def ask_for_too_much() -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")


def first_kernel() -> int:
    torch.ones(1, device=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.synchronize()
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


# --- the checks -------------------------------------------------------------------------------------------------------


def check_order(machine: Machine) -> str:
    """Every rank sees all GPUs, in LOCAL_RANK order."""
    ranks, receipt = _run(distributed(quiet=True)(look_around).submit())
    wanted = [_bare(uuid) for uuid in receipt.gpus]
    if len(wanted) != len(machine.gpus):
        raise Failed(f"requested every GPU ({len(machine.gpus)}), got {len(wanted)}")
    for rank in ranks:
        uuids = rank["uuids"]
        seen = [_bare(str(uuid)) for uuid in uuids] if isinstance(uuids, list) else []
        if len(seen) != len(wanted):
            raise Failed(f"rank {rank['local_rank']} sees {len(seen)} GPUs of {len(wanted)}")
        if not all(seen):
            raise Failed("this version of torch does not report UUIDs, so the order of devices cannot be checked")
        if seen != wanted:
            raise Failed(f"rank {rank['local_rank']} sees {seen}, but the LOCAL_RANK order is {wanted}")
    return f"{len(ranks)} ranks see {len(wanted)} GPUs each, by UUID in the order of the receipt"


def check_nccl(machine: Machine) -> str:
    """An NCCL all_reduce over all GPUs returns the right sum."""
    sums, _ = _run(distributed(quiet=True)(add_up).submit())
    wanted = len(machine.gpus) * (len(machine.gpus) + 1) / 2
    if set(sums) != {wanted}:
        raise Failed(f"all_reduce of rank + 1 over {len(machine.gpus)} GPUs returned {sums}, not {wanted}")
    return f"all_reduce over {len(sums)} ranks returned {wanted:g} on each"


def check_first_touch(machine: Machine) -> str:
    """Only ranks initialize CUDA: the zygote has no context while ranks have one."""
    ranks, _ = _run(distributed(quiet=True)(look_around).submit())
    if not all(rank["first_touch"] for rank in ranks):
        raise Failed("CUDA was initialized before the function began")
    run, pids = _start_holding(machine)
    try:
        zygotes = _zygotes(machine.home)
        usage = machine.nvml.usage([gpu.uuid for gpu in machine.gpus])
        devices = {zygote: _open_gpu_files(zygote) for zygote in zygotes}
    finally:
        run.cancel()
        run.receipt(LIMIT_S)
    if not zygotes:
        raise Failed("no zygote is running, so the check has nothing to examine")
    if any(devices.values()):
        raise Failed(f"a zygote has GPU device files open: {devices}")
    listed = {process.pid for entry in usage.values() for process in entry.processes}
    if listed & set(zygotes):
        raise Failed(f"NVML lists a zygote ({sorted(listed & set(zygotes))}) as a GPU process")
    seen = (
        f"NVML lists ranks {sorted(listed & pids)}"
        if listed & pids
        else "NVML does not show the pids of this container"
    )
    return (
        f"zygotes {zygotes} have no open GPU device file and are not in NVML's list; {seen}; ranks began without CUDA"
    )


def check_left_behind(machine: Machine) -> str:
    """The gate kills a CUDA process that outlives its rank."""
    with tempfile.TemporaryDirectory() as directory:
        child = distributed(gpus=1, quiet=True)(leave_child_behind)
        (pid,), receipt = _run(child.submit(directory, _HOLD, HELD_BYTES))
    if Path(f"/proc/{pid}").exists() and "child-held" in _command_line(pid):
        raise Failed(f"process {pid} still exists after the receipt; gate: {receipt.gate}")
    if receipt.quarantined:
        raise Failed(f"quarantined {receipt.quarantined}; gate: {receipt.gate}")
    return f"grandchild {pid} with {HELD_BYTES >> 20} MiB in a separate session has ended; gate: {receipt.gate}"


def check_cancel(machine: Machine) -> str:
    """Cancelled ranks release their GPU memory, and the gate verifies this."""
    run, _ = _start_holding(machine)
    started_ns = _now_ns()
    run.cancel()
    receipt = run.receipt(LIMIT_S)
    took_ms = (_now_ns() - started_ns) / 1e6
    if receipt.state != "CANCELLED" or receipt.quarantined:
        raise Failed(f"{receipt.state}, quarantined {receipt.quarantined}; gate: {receipt.gate}")
    return f"cancel → gate passed in {took_ms:.0f} ms on {len(receipt.gpus)} GPUs; gate: {receipt.gate}"


def check_telemetry(machine: Machine) -> str:
    """Telemetry reports memory, power, clocks and temperature of every GPU, and memory by process."""
    run, pids = _start_holding(machine)
    sampler = NvmlSampler(wait_s=LIMIT_S)
    try:
        sampler.sample([gpu.uuid for gpu in machine.gpus])
        started_ns = _now_ns()
        reading = sampler.sample([gpu.uuid for gpu in machine.gpus])
        took_ms = (_now_ns() - started_ns) / 1e6
    finally:
        run.cancel()
        run.receipt(LIMIT_S)
    for uuid, seen in reading.gpus.items():
        figures = (seen.busy_percent, seen.power_watts, seen.temperature_celsius, seen.sm_megahertz, seen.throttle)
        if None in figures or (seen.memory_bytes or 0) < HELD_BYTES:
            raise Failed(f"{uuid}: {seen}; {reading.problem}")
    held = sum(reading.memory_by_pid.get(pid, 0) for pid in pids) if reading.memory_by_pid is not None else None
    if held is not None and held < HELD_BYTES * len(machine.gpus):
        raise Failed(f"the ranks {sorted(pids)} hold {HELD_BYTES} bytes each, but NVML reports {held} in total")
    return f"a sample of {len(reading.gpus)} GPUs takes {took_ms:.0f} ms; {next(iter(reading.gpus.values()))}"


def check_out_of_memory(machine: Machine) -> str:
    """The caller gets torch's own exception if GPU memory runs out, with reason gpu_oom."""
    run = distributed(gpus=1, quiet=True)(ask_for_too_much).submit()
    try:
        run.results(LIMIT_S)
    except torch.OutOfMemoryError as error:
        reason = run.receipt(LIMIT_S).reason
        if reason != "gpu_oom":
            raise Failed(f"reason is {reason!r}, not 'gpu_oom'") from error
        return f"the caller got {type(error).__module__}.{type(error).__qualname__}, reason {reason}"
    finally:
        run.cancel()
    raise Failed("the allocation of 1 PiB did not fail")


def check_first_kernel(machine: Machine) -> str:
    """Time to the first finished kernel: warm, cold, and in a fresh interpreter, without a limit."""
    call = distributed(gpus=1, quiet=True)(first_kernel)
    _run(call.submit())
    warm = []
    for _ in range(WARM_ROUNDS):
        time.sleep(0.5)
        called_ns = _now_ns()
        warm.append((_run(call.submit())[0][0] - called_ns) / 1e6)
    cold, fresh = [], []
    for _ in range(COLD_ROUNDS):
        stop_agent(machine.home)
        called_ns = _now_ns()
        cold.append((_run(call.submit())[0][0] - called_ns) / 1e6)
        called_ns = _now_ns()
        subprocess.run([sys.executable, "-c", _FIRST_KERNEL], check=True, timeout=LIMIT_S)
        fresh.append((_now_ns() - called_ns) / 1e6)
    return f"time from call to first kernel: warm {_text(warm)}, cold {_text(cold)}; a fresh interpreter {_text(fresh)}"


CHECKS: tuple[Callable[[Machine], str], ...] = (
    check_order,
    check_nccl,
    check_first_touch,
    check_left_behind,
    check_cancel,
    check_telemetry,
    check_out_of_memory,
    check_first_kernel,
)


# --- main program -----------------------------------------------------------------------------------------------------


def main() -> int:
    """Run every check if the machine has a GPU. Return the exit status."""
    nvml = NvmlProvider()
    gpus = restrict(nvml.devices(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    left_out = "; ".join(f"{device.name}: {device.reason}" for device in nvml.unavailable())
    if not gpus:
        print(f"gpu-check: skipped, this machine has no usable NVIDIA GPU{f' ({left_out})' if left_out else ''}")
        return 0
    problem = _torch_problem()
    if problem:
        print(f"gpu-check: this machine has {len(gpus)} GPUs, but {problem}")
        return 1
    os.environ.pop("SERVERLESS_GPU_FAKE", None)
    with tempfile.TemporaryDirectory(prefix="sgpu-gpu-check-") as home:
        os.environ["SERVERLESS_GPU_HOME"] = home
        machine = Machine(Path(home), nvml, gpus)
        try:
            results = [_checked(check, machine) for check in CHECKS]
        finally:
            stop_agent(machine.home)
    _write(machine, results, left_out)
    failed = [result.name for result in results if not result.passed]
    print(f"gpu-check: {len(results) - len(failed)} of {len(results)} passed; report: {REPORT}")
    return 1 if failed else 0


def _checked(check: Callable[[Machine], str], machine: Machine) -> Result:
    name = (check.__doc__ or check.__name__).strip()
    try:
        result = Result(name, True, check(machine))
    except Failed as failure:
        result = Result(name, False, str(failure))
    except Exception as error:  # noqa: BLE001 - any exception is a failed check, and the others still run
        result = Result(name, False, f"{type(error).__name__}: {error}")
    print(f"{'pass' if result.passed else 'FAIL'}  {name}\n      {result.evidence}", flush=True)
    return result


def _write(machine: Machine, results: Sequence[Result], left_out: str) -> None:
    lines = ["# GPU check", "", f"- {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, {platform.node()}"]
    lines += [f"- GPU {gpu.index}: {gpu.product or gpu.type}, {gpu.memory_bytes >> 20} MiB" for gpu in machine.gpus]
    lines += [f"- serverless-gpu {__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    lines += [f"- not usable: {left_out}"] if left_out else []
    lines += ["", "| check | | evidence |", "|---|---|---|"]
    for result in results:
        evidence = " ".join(result.evidence.split()).replace("|", "\\|")
        lines.append(f"| {result.name} | {'pass' if result.passed else '**FAIL**'} | {evidence} |")
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(run: Run[R]) -> tuple[list[R], Receipt]:
    """Return results and receipt of a run. Cancel a run that takes too long."""
    try:
        return run.results(LIMIT_S), run.receipt(LIMIT_S)
    finally:
        run.cancel()  # Has no effect on a run that has ended.


def _start_holding(machine: Machine) -> tuple[Run[None], set[int]]:
    """Start ranks that hold memory on every GPU. Return the run and the pids once all ranks hold memory."""
    with tempfile.TemporaryDirectory() as directory:
        run = distributed(quiet=True)(hold_memory).submit(directory, HELD_BYTES)
        files = [Path(directory) / f"held-{rank}" for rank in range(len(machine.gpus))]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() and file.read_text() for file in files):
            if run.wait(0.05):
                run.results()
                raise Failed("the ranks ended without holding memory")
            if time.monotonic() > deadline:
                run.cancel()
                raise Failed(f"the ranks did not hold memory within {LIMIT_S:.0f} s; the run is {run.status()}")
        return run, {int(file.read_text()) for file in files}


def _zygotes(home: Path) -> list[int]:
    status = agent_status(home)
    zygotes = status.zygotes if status is not None else ()
    return [zygote.pid for zygote in zygotes if zygote.pid is not None]


def _open_gpu_files(pid: int) -> list[str]:
    """Return the GPU device files that a process has open. A CUDA context needs at least one."""
    files = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return sorted({file for file in files if file.startswith("/dev/nvidia")})


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _torch_problem() -> str:
    """Return the reason if torch cannot use the GPUs, or ""."""
    return "" if torch.cuda.device_count() else f"torch {torch.__version__} sees none of them"


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").lower()


def _text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ms ({min(values):.0f}–{max(values):.0f}, n={len(values)})"


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    sys.exit(main())
