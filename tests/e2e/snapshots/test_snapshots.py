"""`env="snapshot"`: ranks import a restored copy of what the caller has, at the call, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serverless_gpu.testing import agent_status
from tests.support.golden import golden
from tests.support.local.observe import wait_for
from tests.support.local.small_environment import Dialogue, SmallEnvironment, named, zygote_pids

WORK = """
import importlib.metadata, os, sys

def where():
    import toy
    return [toy.VALUE, toy.__file__, __file__, sys.prefix, os.getcwd()]

def versions():
    import toy
    return [toy.VALUE, importlib.metadata.version("toy")]

def code():
    return "first"

def variables():
    return [os.environ.get(name, "") for name in ("VIRTUAL_ENV", "PATH")]
"""


def test_ranks_import_the_restored_copy(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    view = own / "environments" / "view"
    value, toy, module, prefix, cwd = eval(dialogue.ask("call(work.where)"))
    assert (value, prefix, cwd) == ("one", str(view), str(small.project))
    assert Path(toy).is_relative_to(view) and Path(module).is_relative_to(view / "code")
    assert dialogue.ask("'VALUE' in vars(__import__('toy'))") == "True"
    assert dialogue.ask("__import__('toy').__file__") == repr(str(small.site / "toy" / "__init__.py"))
    said = dialogue.close()
    assert re.search(r"capturing the environment \(done once", said)
    assert re.search(
        r"environment [0-9a-f]{12}: .* files and \d+ units, including .* of the project's code; \d+ new, ", said
    )


@pytest.mark.long
def test_a_file_that_git_ignores_is_said_and_its_absence_explained(own: Path, small: SmallEnvironment) -> None:
    small.write(".gitignore", "data/\n_version.py\n")
    for name in ("data", "made"):
        (small.project / name).mkdir()
    small.write("data/x.csv", "1")
    small.write("made/__init__.py", "from made._version import version")
    small.write("made/_version.py", "version = '1.2'")
    small.write("work.py", WORK + "\ndef read(name):\n    return open(os.path.join(os.path.dirname(__file__), name))\n")
    caught = "    try:\n        run.results(60)\n    except OSError as error:\n        return error.__notes__\n"
    small.write("notes.py", f"def of(run):\n{caught}")
    dialogue = Dialogue(small, "work, notes")
    try:
        assert dialogue.ask("call(lambda: __import__('made').version)") == "'1.2'"
        notes = dialogue.ask("notes.of(snapshot(work.read, 'data/x.csv'))")
    finally:
        said = dialogue.close()

    assert golden("snapshots.snapshots.captured-copy-without", project=small.project) in notes
    assert f"would be {small.project}/data/x.csv" in notes
    assert golden("snapshots.snapshots.left-out-directory", project=small.project) in said


def test_the_receipt_and_the_status_name_the_snapshot(own: Path, dialogue: Dialogue) -> None:
    first = dialogue.ask("snapshot(work.code).receipt(60).environment")
    fetched = re.fullmatch(r"'snapshot ([0-9a-f]{12}), (\d+) units, overlay, \2 fetched \(.* [kM]B\)'", first)
    assert fetched, first
    assert dialogue.ask("snapshot(work.code).receipt(60).environment") == golden(
        "snapshots.snapshots.snapshot-units-overlay", fetched=fetched[1], fetched_2=fetched[2]
    )
    assert dialogue.ask("distributed(gpus=1, gpu_type='CPU')(len).submit('a').receipt(60).environment") == "'live'"
    status = agent_status(own)
    assert status is not None
    assert [environment.state for environment in status.environments] == ["ready"]
    assert status.environments[0].snapshot.startswith(fetched[1])
    assert fetched[1] in {zygote.environment[:12] for zygote in status.zygotes}


def test_an_unchanged_environment_is_captured_once_and_warm(own: Path, dialogue: Dialogue) -> None:
    assert dialogue.ask("call(work.code)") == "'first'"
    wait_for(lambda: zygote_pids(own), "the zygote is there")
    assert dialogue.ask("snapshot(work.code).receipt(60).warm") == "True"
    assert dialogue.close().count("capturing the environment") == 1


@pytest.mark.long
def test_variables_name_the_restored_copy(own: Path, small: SmallEnvironment) -> None:
    own_bin = small.python.parent
    caller = Dialogue(small, "work", VIRTUAL_ENV=str(own_bin.parent), PATH=f"{own_bin}:/usr/bin")
    view = own / "environments" / "view"
    try:
        assert eval(caller.ask("call(work.variables)")) == [str(view), f"{view / 'bin'}:/usr/bin"]
    finally:
        caller.close()


def test_project_code_edited_between_two_calls(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    assert dialogue.ask("call(work.code)") == "'first'"
    before = zygote_pids(own)
    small.write("work.py", WORK.replace("first", "second"))
    run = "[run := snapshot(work.code), run.results(60), run.receipt(60).warm]"
    assert dialogue.ask(f"{run}[1:]") == "[['second'], True]", "the caller's own copy is of no interest"
    assert zygote_pids(own) == before, "it has imported nothing of the project"
    assert golden("snapshots.snapshots.environment-changed-work") in dialogue.close()


def test_a_package_upgraded_between_two_calls(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    assert dialogue.ask("call(work.versions)") == "['one', '1.0']"
    before = zygote_pids(own)
    small.install("toy", "2.0", {"toy/__init__.py": "VALUE = 'two'\n"})
    assert dialogue.ask("call(work.versions)") == "['two', '2.0']"
    small.uninstall("toy")
    assert dialogue.ask("call(work.versions)").startswith("ModuleNotFoundError: No module named 'toy'")
    assert zygote_pids(own) == before, "it never imported it"
    said = dialogue.close()
    assert "environment changed: toy 1.0 → 2.0" in said
    assert golden("snapshots.snapshots.environment-changed-toy") in said


@pytest.mark.long
def test_a_package_that_runs_code_at_start_needs_another_zygote(
    own: Path, small: SmallEnvironment, dialogue: Dialogue
) -> None:
    assert dialogue.ask("call(work.code)") == "'first'"
    before = zygote_pids(own)
    small.install("hook", "1.0", {"hook.pth": "import sys; sys.hooked = True\n"})
    assert dialogue.ask("snapshot(lambda: __import__('sys').hooked).results(60)") == "[True]"
    assert zygote_pids(own) != before
    receipt = dialogue.ask("snapshot(work.code).receipt(60).warm")
    assert receipt == "True"


def test_a_file_edited_in_place_is_found_and_said_at_the_next_call(
    own: Path, small: SmallEnvironment, dialogue: Dialogue, where: str
) -> None:
    assert dialogue.ask("call(work.versions)") == "['one', '1.0']"
    path = small.site / "toy" / "__init__.py"
    with path.open("r+") as file:  # no directory changes, and RECORD stays as it is
        file.write("VALUE = 'TWO'\n")
    assert dialogue.ask("call(work.versions)") == "['TWO', '1.0']"
    said = dialogue.close()
    assert said.count("environment changed") == said.count("toy/__init__.py") == 1, said
    assert golden("snapshots.snapshots.environment-changed-toy-toy") in said
    runs = [json.loads((run / "1" / "receipt.json").read_text()) for run in (own / "runs").iterdir()]
    assert sorted(receipt["state"] for receipt in runs) == ["SUCCEEDED"] * 2, "the withdrawn launch is not there"


@pytest.mark.long
def test_every_edit_of_the_same_file_is_said_and_that_it_was_put_back(
    own: Path, small: SmallEnvironment, dialogue: Dialogue
) -> None:
    toy = small.site / "toy" / "__init__.py"
    installed = toy.read_text()
    for text, value in (
        (installed, "one"),
        ("VALUE = 'two'\n", "two"),
        ("VALUE = 'three'\n", "three"),
        (installed, "one"),
    ):
        toy.write_text(text)
        small.write("work.py", WORK if text == installed else WORK + "# edited\n")
        assert dialogue.ask("call(work.versions)") == f"['{value}', '1.0']"
    said = [line for line in dialogue.close().splitlines() if "environment" in line]
    assert [line.partition("environment changed: ")[2] for line in said if "changed" in line] == [
        golden("snapshots.snapshots.toy-toy-init"),
        golden("snapshots.snapshots.toy-toy-init-py"),
        golden("snapshots.snapshots.toy-toy-init-py-2"),
    ], said
    assert sum("done once" in line for line in said) == 1
    assert sum(bool(re.search(r"environment [0-9a-f]{12}: \d of \d+ units new, ", line)) for line in said) == 2, said
    assert "nothing new" in said[-1]


@pytest.mark.long
def test_what_changed_between_two_programs_is_said(own: Path, small: SmallEnvironment) -> None:
    for said, version in (("done once", "1.0"), ("environment changed: toy 1.0 → 2.0", "2.0")):
        small.install("toy", version, {"toy/__init__.py": "VALUE = 'x'\n"})
        caller = Dialogue(small, "work")
        assert caller.ask("call(work.versions)") == f"['x', '{version}']"
        assert said in caller.close()


@pytest.mark.long
def test_links_where_they_are_asked_for(own: Path, small: SmallEnvironment) -> None:
    caller = Dialogue(small, "work", SERVERLESS_GPU_RESTORE="links")
    try:
        value, toy, _, prefix, _ = eval(caller.ask("call(work.where)"))
        assert value == "one" and Path(toy).is_relative_to(own / "environments" / "trees")
        assert Path(prefix).is_relative_to(own / "environments" / "trees")
        receipt = caller.ask("[run := snapshot(work.code), run.receipt(60).environment, run.receipt(60).warm][1:]")
        assert "links (SERVERLESS_GPU_RESTORE=links)" in receipt and receipt.endswith(", True]")
        small.install("toy", "2.0", {"toy/__init__.py": "VALUE = 'two'\n"})
        assert caller.ask("call(work.versions)") == "['two', '2.0']"
        small.write("work.py", WORK.replace("first", "second"))
        reason = caller.ask("[run := snapshot(work.code), run.results(60), run.receipt(60).warm_reason][1:]")
        assert reason == golden("snapshots.snapshots.second-each-environment")
    finally:
        caller.close()


def test_a_way_to_restore_that_does_not_exist_is_refused(own: Path, small: SmallEnvironment) -> None:
    caller = Dialogue(small, "work", SERVERLESS_GPU_RESTORE="rsync")
    try:
        assert caller.ask("call(work.code)") == golden("snapshots.snapshots.invalidvalue-serverless-gpu")
    finally:
        caller.close()


@pytest.mark.long
def test_the_run_is_reproduced_by_hand_in_the_live_environment_and_says_so(
    own: Path, small: SmallEnvironment, dialogue: Dialogue
) -> None:
    directory = Path(eval(dialogue.ask("[run := snapshot(work.where), run.results(60), str(run.directory)][2]")))
    air = directory / "_air.py"
    assert golden("snapshots.snapshots.sgpu-env-diff") in air.read_text().partition("import os")[0]
    done = subprocess.run([small.python, air], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and str(small.project / "work.py") in done.stdout, done
    assert str(small.site / "toy" / "__init__.py") in done.stdout


@pytest.mark.long
def test_a_session_and_a_map(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    """One look at the environment serves all items of a map."""
    line = "[s := session(gpus=1, gpu_type='CPU', env='snapshot', quiet=True), s.distributed(work.code), s.close()][1]"
    assert dialogue.ask(line) == "['first']"
    line = (
        "[run.results(60)[0] for run in distributed(gpus=1, gpu_type='CPU', env='snapshot')(work.double).map([1, 2])]"
    )
    small.write("work.py", WORK + "\ndef double(x):\n    return 2 * x\n")
    assert dialogue.ask("importlib.reload(work).double(1)") == "2"
    assert dialogue.ask(line) == "[2, 4]"


def test_the_original_may_be_gone_when_a_rank_starts(
    own: Path, small: SmallEnvironment, dialogue: Dialogue, where: str
) -> None:
    """A run that waits for its device starts from the copy, whatever has become of the project meanwhile."""
    small.write("work.py", WORK + "\ndef wait(path):\n    while not os.path.exists(path):\n        pass\n")
    dialogue.ask("importlib.reload(work)")
    devices = "gpu_type='H100', gpus=8"
    gate = os.path.join(where, "go")
    assert (
        dialogue.ask(f"[first := snapshot(work.wait, {gate!r}, {devices}), setattr(sys, 'first', first)][1]") == "None"
    )
    assert dialogue.ask(f"setattr(sys, 'later', snapshot(work.where, {devices}))") == "None"
    shutil.move(small.project, small.project.with_name("moved away"))
    shutil.rmtree(small.site / "toy")
    Path(gate).touch()
    value, toy, module, _, cwd = eval(dialogue.ask("sys.later.results(60)[0]"))
    view = str(own / "environments" / "view")
    assert value == "one" and toy.startswith(view) and module.startswith(view) and cwd.startswith(f"{view}/code/")


@pytest.mark.long
def test_two_callers_restore_a_new_environment_once(own: Path, small: SmallEnvironment) -> None:
    first, second = Dialogue(small, "work"), Dialogue(small, "work")
    try:
        for caller in (first, second):
            caller.say("[run := snapshot(work.code), run.results(60), run.receipt(60).environment][2]")
        texts = [caller.hear() for caller in (first, second)]
        assert len({text.split(",")[0] for text in texts}) == 1
        assert sum("fetched" in text for text in texts) >= 1
        log = (own / "agent.log").read_text()
        assert "Traceback" not in log, log
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_a_caller_has_one_service_which_ends_with_it(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    """Also where a process that the caller forked lives on."""
    line = "[os.getpid(), call(work.code), call(work.code), (child := os.fork()) or __import__('time').sleep(60)][0]"
    dialogue.say(line)
    dialogue.hear()
    services = named("sgpu-snapshots", own)
    assert len(services) == 1
    os.kill(dialogue.process.pid, 9)
    services[0].wait_gone()
    os.killpg(dialogue.process.pid, 9)  # its child: the session is the test's own


@pytest.mark.long
def test_a_forked_caller_has_a_service_of_its_own(own: Path, small: SmallEnvironment, dialogue: Dialogue) -> None:
    assert dialogue.ask("call(work.code)") == "'first'"
    line = (
        "[pid := os.fork(), pid or os._exit(0 if call(work.code) == 'first' else 1), "
        "os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])][2]"
    )
    assert dialogue.ask(line) == "0"
    assert dialogue.ask("call(work.code)") == "'first'"
