"""Why there is no warm interpreter for a caller, in words that name what is different."""

from __future__ import annotations

from serverless_gpu.node.zygotes import Key, first_run

MINE = Key("/usr/bin/python3", (), (("OMP_NUM_THREADS", "1"),))


def test_the_first_run_of_an_interpreter() -> None:
    assert first_run(MINE, []) == "first run with this interpreter"
    others = [Key("/opt/python3", (), MINE.variables), Key(MINE.python, ("-O",), MINE.variables)]
    assert first_run(MINE, others) == "first run with this interpreter"


def test_start_up_variables_that_differ_are_named() -> None:
    near = Key(MINE.python, (), (("KMP_INIT_AT_FORK", "FALSE"), ("OMP_NUM_THREADS", "2")))
    far = Key(MINE.python, (), (("LD_PRELOAD", "a"), ("PYTHONHASHSEED", "0"), ("OMP_NUM_THREADS", "2")))
    assert first_run(MINE, [far, near]) == (
        "the warm interpreter was started with other values of KMP_INIT_AT_FORK, OMP_NUM_THREADS"
    )
