"""`%%distributed` in a real kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.golden import golden
from tests.support.local.observe import nothing_of_a_run, wait_for
from tests.support.notebook.kernel import Kernel

LINE = "%%distributed --gpus 2 --gpu-type H100"


@pytest.fixture
def magic(kernel: Kernel) -> Kernel:
    """Return the shared kernel with our extension loaded."""
    assert kernel.run("%load_ext serverless_gpu").error == ("", "")
    return kernel


def test_the_values_of_the_last_expression_are_the_result(magic: Kernel) -> None:
    magic.run("base = 5\ndef double(x):\n    return 2 * x")
    shown = magic.run(f"{LINE} --ranks-log all -o results\nprint('on', rank)\nvalue = base + rank\ndouble(value)")
    assert shown.error == ("", "")
    assert shown.result == "[10, 12]"
    assert sorted(shown.text().splitlines()) == ["[rank 0] on 0", "[rank 1] on 1"]
    assert "SUCCEEDED" in shown.displayed()[0]
    assert magic.run("results").result == "[10, 12]"


def test_what_a_cell_assigns_stays_in_the_ranks(magic: Kernel) -> None:
    magic.run("kept = 1")
    assert magic.run(f"{LINE}\nkept = 2\nkept").result == "[2, 2]"
    assert magic.run("kept, 'rank' in globals()").result == "(1, False)"


@pytest.mark.parametrize("last", ["x = 1", "1;", "print('x')", "pass  # the end"])
def test_a_cell_without_values_shows_none_and_still_keeps_them(magic: Kernel, last: str) -> None:
    shown = magic.run(f"{LINE} -o results\n{last}")
    assert (shown.error, shown.result) == (("", ""), "")
    assert magic.run("len(results)").result == "2"


def test_names_of_the_line_are_expanded_and_quiet_is_quiet(magic: Kernel) -> None:
    magic.run("n = 2")
    shown = magic.run("%%distributed --gpus {n} --gpu-type=h100 --quiet\nworld_size")
    assert (shown.result, shown.displayed()) == ("[2, 2]", [])


def test_functions_of_other_cells_see_what_the_cell_assigns(magic: Kernel) -> None:
    magic.run("def step():\n    return scale * 2")
    assert magic.run(f"{LINE}\nscale = rank\nstep()").result == "[0, 2]"


def test_the_cell_is_the_main_module_of_its_ranks(magic: Kernel) -> None:
    code = """
import pickle
from os.path import *
from concurrent.futures import ThreadPoolExecutor
class Point:
    def __eq__(self, other):
        return isinstance(other, Point)
__name__, basename("a/b"), pickle.loads(pickle.dumps(Point())) == Point(), [world_size * i for i in range(2)]"""
    assert magic.run(f"{LINE}{code}").result == str([("__main__", "b", True, [0, 2])] * 2)


def test_what_the_cell_binds_itself_does_not_travel(magic: Kernel) -> None:
    magic.run("import threading\nmodel = threading.Lock()")
    assert magic.run(f"{LINE}\nmodel = rank\nmodel + 1").result == "[1, 2]"
    shown = magic.run(f"{LINE}\nmodel")
    assert shown.error[0] == "NotPicklable"
    assert "global `model` -> _thread.lock" in shown.error[1]


def test_an_error_shows_the_cells_own_lines_under_their_numbers(magic: Kernel) -> None:
    shown = magic.run(f"{LINE}\nx = 1\nif rank:\n    raise LookupError('no row')  # line 4")
    assert shown.error[0] == "LookupError"
    assert re.fullmatch(
        r"Traceback \(most recent call last\):\n"
        r'  File "<%%distributed In\[\d+\]>", line 4, in <module>\n'
        r"    raise LookupError\('no row'\)  # line 4\n"
        r"[ ^]*\n"
        r"LookupError: no row\n"
        r"rank 1 on host .*, run \w+; log: .*/1/logs",
        shown.traceback,
    )


def test_an_interrupt_cancels_the_cell(magic: Kernel) -> None:
    shown = magic.run(
        f"{LINE}\nimport time\nprint('begun')\ntime.sleep(60)", interrupt_when=lambda shown: "begun" in shown.text()
    )
    assert shown.error == ("KeyboardInterrupt", "")
    assert shown.traceback == "KeyboardInterrupt"
    assert "serverless-gpu: cancelled; " in shown.text("stderr")


@pytest.mark.parametrize(
    ("cell", "error", "text"),
    [
        ("%%distributed --gpuz 2\n1", "InvalidOption", "%%distributed has no option '--gpuz' (did you mean --gpus?)"),
        ("%%distributed --gpus two\n1", "InvalidOption", "--gpus needs a whole number, not 'two'"),
        ("%%distributed --gpu-type H1000\n1", "UnknownGpuType", "unknown GPU type 'H1000'"),
        (
            f"{LINE}\n1\n%pip install x",
            "UsageError",
            "line 3 of the cell is notebook syntax, which ranks cannot run: %pip in",
        ),
        (
            f"{LINE}\nfiles = !ls",
            "UsageError",
            "line 2 of the cell is notebook syntax, which ranks cannot run: files = !ls",
        ),
        (f"{LINE}\nawait x", "UsageError", "line 2 of the cell: ranks cannot await at the top level: await x"),
        (f"{LINE}\nreturn 1", "UsageError", "line 2 of the cell: a cell cannot return or yield: return 1"),
        (f"{LINE}\nx = = 1", "UsageError", "line 2 of the cell is not valid Python: invalid syntax: x = = 1"),
        (f"{LINE} --remote\n1", "ServerNotConfigured", "remote=True needs a server"),
    ],
)
def test_what_cannot_be_is_told_in_words(magic: Kernel, cell: str, error: str, text: str) -> None:
    shown = magic.run(cell)
    assert shown.error[0] == error
    assert text in shown.traceback
    assert shown.traceback.startswith(f"{error}: ")
    assert "File " not in shown.traceback
    assert shown.displayed() == []


def test_the_help_names_the_options(magic: Kernel) -> None:
    shown = magic.run("print(get_ipython().find_cell_magic('distributed').__doc__)")
    assert "--ranks-log" in shown.text() and "-o NAME" in shown.text()


def test_nothing_is_left_of_refused_cells(magic: Kernel, at_home: Path) -> None:
    magic.run(f"{LINE} --gpus 100\n1")
    wait_for(lambda: nothing_of_a_run(at_home), "nothing of the run is left")


def test_tracebacks_name_the_cell_by_its_number(magic: Kernel) -> None:
    for _ in range(2):  # the same text twice
        shown = magic.run("%%distributed --gpus 1 --gpu-type H100 --quiet\n1 / 0")
        assert golden("notebook.magic_cell.file-distributed-line", number=shown.number) in shown.traceback


def test_ranks_have_the_open_of_python(magic: Kernel) -> None:
    """IPython puts its own in front, which refuses the descriptors 0 to 2: they are the kernel's."""
    magic.run("def opened():\n    return open is __import__('io').open")
    assert magic.run("open is __import__('io').open").result == "False"
    assert magic.run(f"{LINE}\nopened(), open is __import__('io').open").result == golden(
        "notebook.magic_cell.true-true-true"
    )
