"""The rows about environments: recognised, captured, restored, sent. What they are measured on: environment_sets.

Nothing that a round writes is deleted before the benchmarks end (environment_sets says why): these rows ask for room.
"""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import environment_sets as sets
from benchmarks.report import Row
from benchmarks.stage import Stage

GATE_MS_MAX = {25_000: 20.0, 100_000: 60.0}
CAPTURE_RATIO_MAX = 0.8
MOUNTED_RATIO_MAX = 0.1
LINKED_RATIO_MAX = 1.0
COLD_RATIO_MAX = 0.9
SMALL_CHANGE_MS_MAX = 400.0
_ROUND_S_MAX = 240.0


def unchanged(quick: bool) -> Row:
    """25,000 files nobody touched: how long a call waits to know, and how long the look at every file takes."""
    return _unchanged(25_000, quick)


def unchanged_large(quick: bool) -> Row:
    """The same with 100,000 files."""
    return _unchanged(100_000, quick)


def _unchanged(count: int, quick: bool) -> Row:
    _name(SGPU_BENCH_TREE=sets.many_files(count))
    theirs = ("uv_freeze", "find", "pip_freeze")
    labels = ("`uv pip freeze` (versions only)", "`find -printf` of every file", "`pip freeze` (versions only)")
    with _stage(("unchanged",), theirs, labels) as stage:
        stage.play(4 if quick else 20, slow=("environment_neighbours.pip_freeze",))
        ours, limit = stage.timing(0, "gate: unchanged, as far as directories and RECORDs tell"), GATE_MS_MAX[count]
        return Row(
            name=f"unchanged environment recognised, {count:,} files",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {limit:.0f} ms",
            met=ours.median <= limit,
            value=f"{ours.median:.1f} ms",
            also=(stage.timing(0, "every file looked at, beside the start of the ranks", "check_ms"),),
            problems=stage.problems(),
        )


def capture(quick: bool) -> Row:
    """A gigabyte that nobody has seen, into an empty store in a directory."""
    sets.need_room((4 if quick else 12) * sets.GIGABYTE)
    _name(SGPU_BENCH_TREE=sets.gigabyte())
    labels = ("`tar \\| zstd -1 -T0`", "venv-pack")
    with _stage(("capture",), ("tar_zstd", "venv_pack"), labels) as stage:
        stage.play(2 if quick else 8, slow=("environment_neighbours.venv_pack",))
        ours, tar = stage.timing(0, "capture"), stage.timing(1, labels[0])
        sizes = [stage.timing(index, "", "mb").median for index in (0, 1)]
        memory_mb = max(stage.timing(0, "", "memory_mb").values)
        return Row(
            name=f"capture {_size_text()}",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {CAPTURE_RATIO_MAX:g}× tar",
            met=ours.median <= CAPTURE_RATIO_MAX * tar.median,
            value=f"{sizes[0]:.0f} MB against {sizes[1]:.0f}, peak {memory_mb:.0f} MB of memory",
            problems=stage.problems(),
        )


def restore(quick: bool) -> Row:
    """The units are on the node: mounts against warm uv."""
    return _restore("restore_mounted", "overlay mounts", MOUNTED_RATIO_MAX, quick, "assembled_ms")


def restore_linked(quick: bool) -> Row:
    """The units are on the node: hard links against warm uv."""
    return _restore("restore_linked", "hard links", LINKED_RATIO_MAX, quick)


def _stage(ours: Sequence[str], theirs: Sequence[str], labels: Sequence[str]) -> Stage:
    names = [f"environment_ours.{name}" for name in ours] + [f"environment_neighbours.{name}" for name in theirs]
    return Stage(names, labels, round_s_max=_ROUND_S_MAX)


def _name(**values: object) -> None:
    """Tell the contestants that are started from now on what to work on."""
    rounds = sets.scratch() / "rounds"
    rounds.mkdir(exist_ok=True)
    os.environ.update(sets.uv_environment())
    os.environ.update(SGPU_BENCH_ROUNDS=str(rounds), SGPU_BENCH_UV=sets.uv())
    os.environ.update({name: str(value) for name, value in values.items()})


def _name_stored() -> None:
    """The same for a gigabyte that has been captured, packed by tar, and made into wheels."""
    wheels, pins = sets.wheels()
    store, packed = sets.scratch() / "store", sets.scratch() / "gigabyte.tar.zst"
    _name(SGPU_BENCH_TREE=sets.gigabyte(), SGPU_BENCH_STORE=store, SGPU_BENCH_NODE=sets.scratch() / "node")
    _name(SGPU_BENCH_WHEELS=wheels, SGPU_BENCH_PINS=pins, SGPU_BENCH_TAR=packed)
    os.environ["SGPU_BENCH_SNAPSHOT"] = _captured(store)
    if not packed.exists():
        command = f"tar -C {shlex.quote(str(sets.gigabyte()))} -cf - . | zstd -1 -T0 -q -o {shlex.quote(str(packed))}"
        subprocess.run(["sh", "-c", command], check=True)


@functools.cache
def _captured(store: Path) -> str:
    """Capture the gigabyte, in a process of its own; return the snapshot's address."""
    command = [sys.executable, "-m", "benchmarks.environment_ours"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _size_text() -> str:
    files = [path for path in sets.gigabyte().rglob("*") if path.is_file() and not path.is_symlink()]
    return f"{sum(path.stat().st_size for path in files) / 1e9:.1f} GB, {len(files):,} files"


def _restore(name: str, how: str, limit: float, quick: bool, beside: str = "") -> Row:
    sets.need_room(6 * sets.GIGABYTE)
    _name_stored()
    with _stage((name,), ("uv_sync",), ("`uv pip sync`, everything in its cache",)) as stage:
        stage.play(3 if quick else 12)
        ours, sync = stage.timing(0, f"restore with {how}"), stage.timing(1, "")
        return Row(
            name=f"restore {_size_text()}, units on the node, {how}",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {limit:g}× uv",
            met=ours.median <= limit * sync.median,
            also=(stage.timing(0, "until its layers are written, not mounted yet", beside),) if beside else (),
            problems=stage.problems(),
        )


def restore_cold(quick: bool) -> Row:
    """The node has nothing, the store is a directory on the same disk."""
    rounds = 2 if quick else 8
    sets.need_room((rounds + 1) * 4 * sets.GIGABYTE)
    _name_stored()
    with _stage(("restore_cold",), ("zstd_tar",), ("`zstd -d \\| tar x`",)) as stage:
        stage.play(rounds)
        ours, tar = stage.timing(0, "restore, every file checked"), stage.timing(1, "")
        memory_mb = max(stage.timing(0, "", "memory_mb").values)
        return Row(
            name=f"restore {_size_text()}, nothing on the node",
            ours=ours,
            against=stage.against(),
            bar=f"≤ {COLD_RATIO_MAX:g}× tar",
            met=ours.median <= COLD_RATIO_MAX * tar.median,
            value=f"peak {memory_mb:.0f} MB of memory",
            problems=stage.problems(),
        )


def sent_after_edit(quick: bool) -> Row:
    """One line added to a file of torch by hand."""
    return _sent("a hand edit in torch", "sent_after_edit", quick)


def sent_after_install(quick: bool) -> Row:
    """A small distribution in another version."""
    return _sent("a small package", "sent_after_install", quick)


def _sent(what: str, name: str, quick: bool) -> Row:
    sets.need_room(4 * sets.GIGABYTE)
    _name_stored()
    with _stage((name,), ("tar_zstd",), ("`tar \\| zstd -1` of all of it",)) as stage:
        stage.play(2 if quick else 5, slow=("environment_neighbours.tar_zstd",))
        return Row(
            name=f"sent for {what}",
            ours=stage.timing(0, "to the store", "mb"),
            against=stage.against("mb"),
            also=(stage.timing(0, f"{what}: until it is captured"),),
            problems=stage.problems(),
        )


def sent_after_upgrade(quick: bool) -> Row:
    """The next minor version of torch; wheels from PyPI, for a machine that is not this one."""
    wheels, prefix = sets.torch_wheels(), sets.scratch() / "upgraded" / "venv"
    sets.new_venv(prefix)
    _name(SGPU_BENCH_TREE=prefix, SGPU_BENCH_STORE=sets.scratch() / "upgrade-store", SGPU_BENCH_TORCH=wheels)
    # The round that is thrown away captures the old version, the one that counts the new one.
    labels = ("its wheel", "`tar \\| zstd -1` of it")
    with _stage(("sent_after_upgrade",), ("newest_wheel", "tar_zstd"), labels) as stage:
        stage.play(1)
        before, after = sets.TORCH_VERSIONS
        return Row(
            name=f"sent for torch {before} → {after} ({sets.torch_platform()})",
            ours=stage.timing(0, "to the store", "mb"),
            against=stage.against("mb"),
            also=(stage.timing(0, "the upgrade: until it is captured"),),
            problems=stage.problems(),
        )


def small_change(quick: bool) -> Row:
    """Another version of a small package, which the zygote never imported, then a call with `env="snapshot"`."""
    with Stage(("environment_calls.changed", "environment_calls.unchanged"), ("nothing changed",)) as stage:
        stage.play(3 if quick else 12, pause_s=1.0)
        ours, unchanged = stage.timing(0, "small package changed; call → first line"), stage.timing(1, "")
        more_ms = ours.median - unchanged.median
        return Row(
            name='env="snapshot": a small package changed, call → first line',
            ours=ours,
            against=stage.against(),
            bar=f"≤ {SMALL_CHANGE_MS_MAX:.0f} ms more",
            met=more_ms <= SMALL_CHANGE_MS_MAX,
            value=f"{more_ms:.0f} ms more",
            problems=stage.problems(),
        )


def to_nodes(quick: bool) -> Row:
    """An environment of 128 MiB from a bucket through the server to eight cold nodes at once, beside one."""
    sets.need_room(3 * sets.GIGABYTE)
    names = ("many_line", "one_line", "many_line_without", "one_direct", "many_direct", "many_direct_without")
    labels = (
        "1 node",
        "8 nodes, the server keeps no copies",
        "1 node, no limit on the server's line",
        "8 nodes, likewise",
        "8 nodes, likewise, the server keeps no copies",
    )
    with Stage([f"units.{name}" for name in names], labels, round_s_max=_ROUND_S_MAX) as stage:
        stage.play(2 if quick else 5)
        most = max(stage.timing(0, "", "most").values)
        read = [stage.timing(index, "", "mb").median for index in (0, 2)]
        return Row(
            name="environment of 128 MiB to 8 cold nodes at once, bucket 200 MB/s, the server's line 1 Gbit/s",
            ours=stage.timing(0, "until the last node has it laid out"),
            against=stage.against(),
            bar="each object of the bucket is read once",
            met=most == 1,
            value=f"{most:.0f} read of each, {read[0]:.0f} MB; {read[1]:.0f} MB without copies",
            problems=stage.problems(),
        )


ROWS: dict[str, Callable[[bool], Row]] = {
    "env-unchanged": unchanged,
    "env-unchanged-100k": unchanged_large,
    "env-capture": capture,
    "env-restore": restore,
    "env-restore-links": restore_linked,
    "env-restore-cold": restore_cold,
    "env-small-change": small_change,
    "units-to-nodes": to_nodes,
    "env-sent-edit": sent_after_edit,
    "env-sent-package": sent_after_install,
    "env-sent-upgrade": sent_after_upgrade,
}
