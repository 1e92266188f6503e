"""A notebook as people use it: define in one cell, call in another, interrupt, read the error, install, edit, go on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest

from serverless_gpu import attach
from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.observe import held_locks, nothing_of_a_run, run_directories, wait_for
from tests.support.notebook.kernel import Kernel, Shown

HELD = "held"


def zygote_is_ready(home: Path) -> bool:
    """Return whether the home's one zygote is ready."""
    status = agent_status(home)
    return status is not None and len(status.zygotes) == 1 and status.zygotes[0].state == "ready"


def frames_of_ours(traceback: str) -> int:
    """Return how many frames of a shown traceback are this package's."""
    return len(re.findall(r"^File .*/serverless_gpu/", traceback, re.MULTILINE))


# --- define, call, interrupt ------------------------------------------------------------------------------------------


def test_decorating_in_a_cell_warms_up_so_that_the_first_call_is_warm(kernel: Kernel, at_home: Path) -> None:
    # A kernel has threads, event loops and a captured stdout; the zygote is nothing of its, and none of that hurts.
    wait_for(lambda: zygote_is_ready(at_home), "the zygote that decorating asked for is ready")
    shown = kernel.run("receipt = work.submit(1).receipt(); receipt.warm, receipt.warm_reason")
    assert shown.result == "(True, '')"


def test_23B7_a_call_shows_rank_lines_the_receipt_below_them_and_the_results(kernel: Kernel) -> None:
    shown = kernel.run("work.distributed(21)")
    assert shown.error == ("", "")
    assert shown.result == "[0, 21]"
    assert (shown.text("stdout"), shown.text("stderr")) == ("[rank 0] rank 0 works\n", "")
    status, plain = shown.displayed("text/plain")
    _, page = shown.displayed("text/html")
    assert status.startswith("SUCCEEDED after ")
    assert re.fullmatch(r"2 × H100 \(fake\) · [\d.]+ m?s · verified free in [\d.]+ m?s", plain.splitlines()[0])
    assert page.startswith("<div") and "<table" in page and "<b>SUCCEEDED</b>" in page and "<script" not in page


def test_a_quiet_call_shows_rank_lines_only(kernel: Kernel) -> None:
    shown = kernel.run('distributed(gpus=2, gpu_type="H100", quiet=True)(work).distributed(2)')
    assert shown.result == "[0, 2]"
    assert shown.text() == "[rank 0] rank 0 works\n"
    assert shown.displayed() == []


def test_a_receipt_at_the_end_of_a_cell_is_a_table_with_text_beside_it(kernel: Kernel) -> None:
    shown = kernel.run("work.submit(1).receipt()")
    assert re.match(r"run \w+ · attempt 1 · SUCCEEDED\n2 H100", shown.result)
    (output,) = [output for output in shown.cell.outputs if output["output_type"] == "execute_result"]
    assert "<table" in output["data"]["text/html"]


def test_an_interrupted_cell_cancels_says_so_and_the_next_cell_runs(
    kernel: Kernel, at_home: Path, tmp_path: Path
) -> None:
    shown = kernel.run(f"hold.distributed({str(tmp_path)!r})", interrupt_when=lambda shown: "holding" in shown.text())
    assert shown.error == ("KeyboardInterrupt", "")
    assert frames_of_ours(shown.traceback) == 0
    said = shown.text("stderr")
    assert said.startswith("serverless-gpu: cancelling; press the stop button again to leave at once\n")
    assert re.search(r"^serverless-gpu: cancelled; 2 .*free.*, after [\d.]+ m?s$", said, re.MULTILINE)
    assert shown.displayed()[0].startswith("CANCELLED after ")
    wait_for(lambda: nothing_of_a_run(at_home), "nothing of the run is left")
    assert kernel.run("work.distributed(3)").result == "[0, 3]"


def test_a_cell_that_waits_says_for_what_and_can_be_interrupted(kernel: Kernel, at_home: Path, tmp_path: Path) -> None:
    kernel.run(f"held = [hold.submit({str(tmp_path)!r}) for _ in range(2)]")
    wait_for(lambda: sum(name.endswith(".lock") for name in held_locks(at_home)) == 4, "both runs have their devices")

    def waits(shown: Shown) -> bool:
        return any(text.startswith("QUEUED ") for text in shown.displayed())

    shown = kernel.run("work.distributed(3)", interrupt_when=waits)
    assert shown.error == ("KeyboardInterrupt", "")
    assert "waiting" not in shown.text()
    assert re.search(r"^serverless-gpu: cancelled; .*, after [\d.]+ m?s$", shown.text("stderr"), re.MULTILINE)
    (tmp_path / "go").touch()
    assert kernel.run("[run.results() for run in held]").result == str([[HELD, HELD], [HELD, HELD]])


def test_on_interrupt_detach_leaves_the_run_alone_and_says_how_to_find_it(kernel: Kernel, tmp_path: Path) -> None:
    shown = kernel.run(
        f'distributed(gpus=2, gpu_type="H100", on_interrupt="detach")(hold).distributed({str(tmp_path)!r})',
        interrupt_when=lambda shown: "holding" in shown.text(),
    )
    assert shown.error == ("KeyboardInterrupt", "")
    found = re.search(r"find it again with serverless_gpu\.(attach\('\w+'\))", shown.text("stderr"))
    assert found
    (tmp_path / "go").touch()
    assert kernel.run(f"{found[1]}.results()").result == str([HELD, HELD])


# --- errors -----------------------------------------------------------------------------------------------------------

FAILING = """
@distributed(gpus=2, gpu_type="H100")
def failing(rank):
    if rank == 1:
        raise LookupError("no such <row>")  # the user's own line
    time.sleep(60)
"""


def test_23B12_an_exception_keeps_its_type_and_the_cell_shows_the_users_frames_only(kernel: Kernel) -> None:
    kernel.run(FAILING)
    shown = kernel.run("failing.distributed()")
    assert shown.error[0] == "LookupError"
    assert shown.error[1].startswith("no such <row>")
    assert golden("notebook.kernel.raise-lookuperror-such") in shown.traceback
    assert "----> 1 failing.distributed()" in shown.traceback
    assert "rank 1 on host" in shown.traceback
    assert frames_of_ours(shown.traceback) == 0
    assert (
        kernel.run("try:\n    failing.distributed()\nexcept LookupError as error:\n    print('caught')")
        .text("stdout")
        .endswith("caught\n")
    )


def test_23B12_a_wrong_call_is_told_without_our_frames(kernel: Kernel) -> None:
    shown = kernel.run("work.distributed()")
    assert shown.error == ("ArgumentMismatch", golden("notebook.kernel.arguments-do-fit"))
    assert frames_of_ours(shown.traceback) == 0


def test_what_cannot_travel_is_named_without_the_picklers_frames(kernel: Kernel) -> None:
    kernel.run("import threading\nlock = threading.Lock()")
    shown = kernel.run('distributed(gpus=2, gpu_type="H100")(lambda: lock).distributed()')
    assert shown.error[0] == "NotPicklable"
    assert "global `lock`" in shown.error[1]
    assert frames_of_ours(shown.traceback) == 0
    assert shown.displayed() == []


# --- progress ---------------------------------------------------------------------------------------------------------

BARS = """
from tqdm.auto import tqdm

@distributed(gpus=2, gpu_type="H100", ranks_log="all")
def bars(path, rank):
    for i in tqdm(range(3), desc=f"<step> of {rank}", mininterval=0, ncols=60):
        while i == 2 and not os.path.exists(os.path.join(path, "go")):
            time.sleep(0.01)
"""


def test_progress_bars_are_in_the_status_until_they_are_done(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(BARS)
    seen: list[tuple[str, str, str]] = []

    def look(shown: Shown) -> None:
        for plain, page in zip(shown.displayed(), shown.displayed("text/html"), strict=True):
            if plain.startswith("RUNNING") and plain.count("67%") == 2:
                seen.append((plain, page, shown.text()))
                (tmp_path / "go").touch()

    shown = kernel.run(f"bars.distributed({str(tmp_path)!r})", look=look)
    plain, page, streamed = seen[0]
    assert re.match(r"RUNNING for \d+ s\nrank 0  <step> of 0: +67%.*\nrank 1  <step> of 1: +67%", plain)
    assert "&lt;step&gt; of 1" in page and "<step>" not in page
    assert "67%" not in streamed
    finished = [line for line in shown.text("stderr").splitlines() if "100%" in line]
    assert sorted(line[:8] for line in finished) == ["[rank 0]", "[rank 1]"]
    assert shown.displayed()[0].startswith("SUCCEEDED after ")
    assert shown.result == "[None, None]"


# --- packages and modules ---------------------------------------------------------------------------------------------


def build_wheel(directory: Path, name: str, source: str) -> Path:
    """Write a small pure wheel by hand."""
    path = directory / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", source)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


USES_PACKAGE = """
@distributed(gpus=2, gpu_type="H100")
def uses():
    import small_package_of_a_test
    return small_package_of_a_test.ANSWER
"""


def test_a_package_installed_in_a_cell_is_seen_by_ranks_that_start_warm(
    kernel: Kernel, at_home: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(tmp_path, "small_package_of_a_test", "ANSWER = 42\n")
    site = tmp_path / "site"
    site.mkdir()
    kernel.run(f"import sys; sys.path.append({str(site)!r})")
    kernel.run(USES_PACKAGE)
    # Before: the ranks look for it, so that whatever they remember about that directory would show afterwards.
    assert kernel.run("uses.distributed()").error[0] == "ModuleNotFoundError"
    wait_for(lambda: zygote_is_ready(at_home), "the zygote is ready")
    before = agent_status(at_home)
    installed = kernel.run(f"%pip install --quiet --no-index --no-deps --target {site} {wheel}")
    assert installed.error == ("", "")
    assert (site / "small_package_of_a_test.py").exists(), installed.text()
    shown = kernel.run("run = uses.submit(); run.results(), run.receipt().warm, run.receipt().warm_reason")
    assert shown.result == "([42, 42], True, '')"
    after = agent_status(at_home)
    assert before is not None and after is not None
    assert [each.pid for each in after.zygotes] == [each.pid for each in before.zygotes]


def test_a_helper_module_that_was_edited_and_reloaded_is_new_in_the_ranks(kernel: Kernel, folder: Path) -> None:
    module = folder / "helper_one.py"
    module.write_text("def answer():\n    return 'old'\n", encoding="utf-8")
    kernel.run("import importlib, helper_one")
    call = 'distributed(gpus=2, gpu_type="H100")(lambda: helper_one.answer()).distributed()'
    assert kernel.run(call).result == "['old', 'old']"
    by_name = 'distributed(gpus=2, gpu_type="H100")(helper_one.answer).distributed()'
    module.write_text("def answer():\n    return 'new and longer'\n", encoding="utf-8")
    kernel.run("importlib.reload(helper_one)")
    assert kernel.run(call).result == golden("notebook.kernel.new-longer-new")
    assert kernel.run(by_name).result == golden("notebook.kernel.new-longer-new")


def test_autoreload_brings_an_edited_module_to_functions_defined_before(kernel: Kernel, folder: Path) -> None:
    module = folder / "helper_two.py"
    module.write_text("def answer():\n    return 'old'\n", encoding="utf-8")
    kernel.run("%load_ext autoreload\n%autoreload 2\nimport helper_two\nfrom helper_two import answer")
    kernel.run('ask = distributed(gpus=2, gpu_type="H100")(answer)')
    assert kernel.run("ask.distributed()").result == "['old', 'old']"
    module.write_text("def answer():\n    return 'new and longer'\n", encoding="utf-8")
    os.utime(module, (os.stat(module).st_atime, os.stat(module).st_mtime + 2))  # as if edited two seconds later
    assert kernel.run("answer()").result == "'new and longer'"
    assert kernel.run("ask.distributed()").result == golden("notebook.kernel.new-longer-new")
    kernel.run("%autoreload 0")


def test_a_held_session_works_in_a_notebook(kernel: Kernel) -> None:
    shown = kernel.run(
        "import serverless_gpu\n"
        'with serverless_gpu.session(gpus=2, gpu_type="H100") as session:\n'
        "    results = session.distributed(work, 4)\n"
        "results"
    )
    assert shown.error == ("", "")
    assert shown.result == "[0, 4]"
    status, of_the_run, of_the_session = shown.displayed()
    assert status.startswith("SUCCEEDED after ")
    assert all(
        "2 × H100 (fake) · " in receipt and "verified free in " in receipt for receipt in (of_the_run, of_the_session)
    )
    assert "[rank 0] rank 0 works" in shown.text("stdout")


# --- event loops, processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nassert asyncio.get_running_loop()\nwork.distributed(5)",
        "async def call():\n    return work.distributed(5)\nawait call()",
        "import asyncio\nawait asyncio.to_thread(work.distributed, 5)",
    ],
    ids=["in the cell's loop", "in a coroutine", "in a thread"],
)
def test_calls_work_where_an_event_loop_runs(kernel: Kernel, source: str) -> None:
    shown = kernel.run(source)
    assert shown.error == ("", "")
    assert shown.result == "[0, 5]"
    assert shown.text() == "[rank 0] rank 0 works\n"
    assert len(shown.displayed()) == 2


FILES = """
def files():
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return {name for name in found if name.startswith(("pipe:", "socket:"))}
"""


def test_ranks_have_none_of_the_kernels_pipes_and_sockets(kernel: Kernel) -> None:
    kernel.run(FILES)
    kernel.run('ranks = distributed(gpus=2, gpu_type="H100")(files).distributed()')
    shown = kernel.run("len(files()) > 5, files() & set.union(*ranks)")
    assert shown.result == "(True, set())"


# --- the kernel's death -----------------------------------------------------------------------------------------------


def test_a_submitted_run_outlives_a_kernel_that_is_killed(new_kernel: Callable[[], Kernel], tmp_path: Path) -> None:
    kernel = new_kernel()
    run_id = kernel.run(f"print(hold.submit({str(tmp_path)!r}).id)").text("stdout").strip()
    wait_for(lambda: (tmp_path / "started-1").exists(), "the ranks run")
    os.kill(kernel.pid, 9)
    found = attach(run_id)
    wait_for(lambda: found.status() == "RUNNING", "it goes on, and its supervisor knows that it runs")
    (tmp_path / "go").touch()
    assert found.results(timeout=50) == [HELD, HELD]


def test_a_submitted_run_outlives_a_notebook_that_is_closed(new_kernel: Callable[[], Kernel], tmp_path: Path) -> None:
    kernel = new_kernel()
    run_id = kernel.run(f"print(hold.submit({str(tmp_path)!r}).id)").text("stdout").strip()
    wait_for(lambda: (tmp_path / "started-1").exists(), "the ranks run")
    kernel.shut_down()
    (tmp_path / "go").touch()
    assert attach(run_id).results(timeout=50) == [HELD, HELD]


def test_the_run_of_a_blocking_call_outlives_its_kernel(
    new_kernel: Callable[[], Kernel], at_home: Path, tmp_path: Path
) -> None:
    before = set(run_directories(at_home))
    kernel = new_kernel()
    kernel.die(f"hold.distributed({str(tmp_path)!r})", when=(tmp_path / "started-1").exists)
    (run_id,) = set(run_directories(at_home)) - before
    found = attach(run_id)
    wait_for(lambda: found.status() == "RUNNING", "it goes on, and its supervisor knows that it runs")
    (tmp_path / "go").touch()
    assert found.results(timeout=50) == [HELD, HELD]


def test_a_cell_that_awaits_can_be_interrupted_too(kernel: Kernel, at_home: Path, tmp_path: Path) -> None:
    """The kernel takes SIGINT while such a cell runs, and would only cancel a task that never gets a turn."""
    shown = kernel.run(
        f"import asyncio\nhold.distributed({str(tmp_path)!r})\nawait asyncio.sleep(0)",
        interrupt_when=lambda shown: "holding" in shown.text(),
    )
    assert shown.error == ("KeyboardInterrupt", "")
    assert "serverless-gpu: cancelled; " in shown.text("stderr")
    wait_for(lambda: nothing_of_a_run(at_home), "nothing of the run is left")
    assert kernel.run("await asyncio.sleep(0, 7)").result == "7"
