"""Work on many files is divided between this process and a fork of it.

Two threads would pass the interpreter to and fro at each of the system calls, and there are ten thousands of them. Each
process takes the next piece of work from a pipe when it has done the one before.

Where this process has other threads no fork is safe, and with one core it is of no use: then this process does it all.

Failure cases: an error in either process (it is raised here, once both have stopped), the fork is killed (`OSError`
that says so), this process is killed (the fork finishes the piece at hand and what is left in the pipe, less than a
second of work; until then it holds the locks that this process held).
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

import msgspec

from serverless_gpu.errors import EnvironmentRejected
from serverless_gpu.json_codec import from_msgpack

_NUMBER = struct.Struct("=H")
_NUMBERS_MAX = 2048
"""So many fit into any pipe."""
_DONE, _FAILED = b"+", b"!"

_Result = TypeVar("_Result")


class _Problem(msgspec.Struct, frozen=True):
    """An error of the fork: an `OSError`, or with number 0 a message of the rules."""

    number: int
    text: str
    file: str = ""


def divide(count: int, work: Callable[[Iterator[int]], _Result], kind: type[_Result]) -> list[_Result]:
    """Do pieces of work, in two processes where that is possible.

    `work` does the pieces whose numbers it is given, and raises `OSError` or `EnvironmentRejected`; `kind` is what it
    returns, as msgspec knows it.
    """
    if count < 2 or len(os.sched_getaffinity(0)) < 2 or len(os.listdir("/proc/self/task")) > 1:
        return [work(iter(range(count)))]
    numbers, writing = os.pipe()
    answer, answering = os.pipe()
    step = -(-count // _NUMBERS_MAX)
    os.write(writing, b"".join(_NUMBER.pack(number) for number in range(-(-count // step))))
    os.close(writing)
    try:
        pid = os.fork()
    except OSError:  # no process can be started
        for fd in (numbers, answer, answering):
            os.close(fd)
        return [work(iter(range(count)))]
    mine = _taken(numbers, step, count)
    if pid == 0:
        _be_fork(work, mine, answering)
    os.close(answering)
    try:
        ours = work(mine)
    finally:
        while os.read(numbers, _NUMBERS_MAX):  # after an error the rest is not needed
            pass
        os.close(numbers)
        with open(answer, "rb") as file:
            said = file.read()
        status = os.waitpid(pid, 0)[1]
    return [ours, _result(said, status, kind)]


def _taken(numbers: int, step: int, count: int) -> Iterator[int]:
    while data := os.read(numbers, _NUMBER.size):
        first = _NUMBER.unpack(data)[0] * step
        yield from range(first, min(first + step, count))


def _be_fork(work: Callable[[Iterator[int]], object], numbers: Iterator[int], answering: int) -> NoReturn:
    code = 1
    try:
        try:
            said = _DONE + msgspec.msgpack.encode(work(numbers))
        except OSError as error:
            problem = _Problem(error.errno or 0, error.strerror or str(error), str(error.filename or ""))
            said = _FAILED + msgspec.msgpack.encode(problem)
        except EnvironmentRejected as error:
            said = _FAILED + msgspec.msgpack.encode(_Problem(0, error.message))
        with open(answering, "wb") as file:
            file.write(said)
        code = 0
    except Exception:  # noqa: BLE001 - this is where the process ends
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def _result(said: bytes, status: int, kind: type[_Result]) -> _Result:
    if status or not said:
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ChildProcessError(0, f"the process that did half of the work {how}")
    if said.startswith(_DONE):
        return from_msgpack(said[1:], kind)
    problem = from_msgpack(said[1:], _Problem)
    if not problem.number:
        raise EnvironmentRejected(problem.text)
    raise OSError(problem.number, problem.text, problem.file or None)
