"""`%load_ext serverless_gpu`: the cell magic `%%distributed`.

    %%distributed --gpus 2 --gpu-type CPU -o results
    import torch.distributed as dist        every rank runs the cell, with the names of the notebook it uses
    dist.init_process_group("gloo")
    rank * 10                               the list of these values is the cell's result: [0, 10]

Names that the cell assigns stay in the ranks. Failure cases: every error is raised, so that the notebook stops here;
its traceback omits the frames of IPython and ours.
"""

from __future__ import annotations

import contextlib
import difflib
import keyword
import shlex
import traceback
from collections.abc import Callable, Iterator
from typing import Protocol

from serverless_gpu.client.decorator import distributed
from serverless_gpu.client.launch.launch import prewarm, should_prewarm
from serverless_gpu.client.launch.remedies import explain
from serverless_gpu.client.notebook.cells import compile_cell, ends_silently
from serverless_gpu.client.runs.rank_failures import RemoteTraceback
from serverless_gpu.errors import InvalidOption, NoSuitableNode, NotPicklable
from serverless_gpu.model.spec import RunSpec
from serverless_gpu.node.inside.call import distributed_cell
from serverless_gpu.units import parse_duration_s


class Compiler(Protocol):
    """The used part of IPython's compiler."""

    flags: int


class Shell(Protocol):
    """The used part of IPython's shell."""

    user_ns: dict[str, object]
    execution_count: int
    history_manager: object
    compile: Compiler

    def register_magic_function(self, func: Callable[..., object], magic_kind: str, magic_name: str) -> None:
        """Make a function a magic."""


def load_ipython_extension(ipython: Shell) -> None:
    """Register `%%distributed`; called by `%load_ext serverless_gpu`."""

    def magic(line: str, cell: str) -> object:
        return run_magic(ipython, line, cell)

    magic.__doc__ = _HELP
    ipython.register_magic_function(magic, "cell", "distributed")
    if should_prewarm("__main__"):
        prewarm(RunSpec())


def run_magic(shell: Shell, line: str, cell: str) -> list[object] | None:
    """Run a cell on every rank and return its values, or None when there is nothing to show."""
    with _shown_briefly():
        options, output = parse_line(line)
        # A newer IPython counts a cell before it runs it, an older one after.
        history = getattr(shell.history_manager, "input_hist_raw", [])
        stored = len(history) > 1 and history[-1].rstrip().endswith(cell.rstrip())
        name = f"<%%distributed In[{len(history) - 1 if stored else shell.execution_count}]>"
        code = compile_cell(f"%%distributed {line}", cell, shell.user_ns, name=name, flags=shell.compile.flags)
        decorate = distributed(**options)  # type: ignore[arg-type]  # checked there, as from anybody
        try:
            results = decorate(distributed_cell).distributed(*code)  # type: ignore[call-arg]  # rank and world_size are filled in
        except NotPicklable as error:
            raise NotPicklable(_of_the_cell(error.message), hint=error.hint) from None
        except NoSuitableNode as error:
            explain(error, "command line")
            raise
    if output:
        shell.user_ns[output] = results
    silent = ends_silently(cell) or all(value is None for value in results)
    return None if silent else results


# --- the line ---------------------------------------------------------------------------------------------------------


def _seconds(text: str) -> object:
    """Return a number of seconds; text with a unit is read where all options are."""
    try:
        return float(text)
    except ValueError:
        parse_duration_s(text)
        return text


# Options of `distributed` by how their value is written; None: a switch.
VALUES: dict[str, tuple[Callable[[str], object], str] | None] = {
    "gpus": (int, "a whole number"),
    "gpu_type": (str, "a name"),
    "timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "grace": (_seconds, "a duration such as 90, 5m or 2h"),
    "hang_timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "idle_timeout": (_seconds, "a duration such as 90, 5m or 2h"),
    "cpus": (int, "a whole number"),
    "memory": (str, "bytes, such as 64GiB"),
    "ranks_log": (
        lambda text: text if text == "all" else [int(rank) for rank in text.split(",")],
        "all, or ranks such as 0,3",
    ),
    "tags": (
        lambda text: dict(pair.split("=", 1) for pair in text.split(",")),
        "pairs such as team=search,job=nightly",
    ),
    "on_interrupt": (str, "cancel or detach"),
    "init": (str, "nccl or gloo"),
    "policy": (str, "a name"),
    "pool": (str, "a name"),
    "team": (str, "a name"),
    "priority": (str, "a name"),
    "retries": (int, "a whole number"),
    "env": (str, "a name"),
    "secrets": (lambda text: text.split(","), "names such as A,B"),
    "quiet": None,
    "ignore_busy": None,
    "same_node": None,
    "resume": None,
    "retry_on_infra": None,
    "remote": None,
    "wait": None,
}


def parse_line(line: str) -> tuple[dict[str, object], str]:
    """Return the options on a magic's line, and the name after ``-o`` or ""."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InvalidOption(f"the line of %%distributed cannot be read: {error}") from None
    options: dict[str, object] = {}
    output = ""
    while words:
        word, joined, value = words.pop(0).partition("=")
        if word in ("-o", "--output"):
            output = _value(word, value if joined else words)
            if not output.isidentifier() or keyword.iskeyword(output):
                raise InvalidOption(f"{word} needs the name of a variable, not {output!r}")
            continue
        name = _option(word)
        kind = VALUES[name]
        if kind is None:
            if joined:
                raise InvalidOption(f"{word} takes no value")
            options[name] = True
            continue
        text = _value(word, value if joined else words)
        try:
            options[name] = kind[0](text)
        except ValueError:
            raise InvalidOption(f"{word} needs {kind[1]}, not {text!r}") from None
    return options, output


def _option(word: str) -> str:
    spelled = {f"--{name.replace('_', '-')}": name for name in VALUES}
    written = word.replace("_", "-")
    if written in spelled:
        return spelled[written]
    near = difflib.get_close_matches(written, spelled, n=1, cutoff=0.8)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise InvalidOption(
        f"%%distributed has no option {word!r}{guess}", hint="valid options: " + ", ".join(["-o NAME", *spelled])
    )


def _value(word: str, rest: str | list[str]) -> str:
    if isinstance(rest, str):
        return rest
    if not rest or rest[0].startswith("--"):
        raise InvalidOption(f"{word} needs a value")
    return rest.pop(0)


_HELP = f"""Run the cell on every rank; the values of its last expression are the result, one for each rank.

    %%distributed --gpus 8 --gpu-type H100 --ranks-log all -o results

The cell uses the notebook's variables and functions, and `rank` and `world_size`. What it assigns stays in the ranks.

    -o NAME              also put the list of results into a variable
    {
    chr(10)
    .join(f"    --{name.replace('_', '-'):<18} {kind[1] if kind else 'a switch'}" for name, kind in VALUES.items())
    .strip()
}

They mean what they mean for `distributed`.
"""


# --- errors -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _shown_briefly() -> Iterator[None]:
    """Let IPython show an error's own text, without its frames and ours."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        text = _told(error)
        with contextlib.suppress(Exception):  # an exception class of the user's may refuse attributes
            object.__setattr__(error, "_render_traceback_", lambda: text.splitlines())
        raise


def _of_the_cell(message: str) -> str:
    """Return a sentence about our function as one about the cell, which its reader knows."""
    for ours, theirs in (
        ("the call to distributed_cell", "the cell"),
        ("argument `notebook` -> ", ""),
        (" of `cell`", ""),
    ):
        message = message.replace(ours, theirs)
    return message


def _told(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(cause, RemoteTraceback):
        notes = [note for note in getattr(error, "__notes__", []) if str(note) not in cause.text]
        return "\n".join([cause.text.rstrip("\n"), *map(str, notes)])
    said = "".join(traceback.format_exception_only(error)).rstrip("\n")
    return said.removeprefix(f"{type(error).__module__}.")
