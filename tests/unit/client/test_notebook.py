"""The line of `%%distributed`: options by name, and what is told when one is wrong."""

from __future__ import annotations

import inspect

import pytest

from serverless_gpu.client.decorator import distributed
from serverless_gpu.client.notebook import VALUES, parse_line
from serverless_gpu.errors import InvalidOption
from serverless_gpu.model.spec import Options
from tests.support.paths import REPOSITORY

REFERENCE = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8")


def test_every_option_of_distributed_can_be_written_or_is_left_out_on_purpose() -> None:
    options = {*inspect.signature(distributed).parameters, *Options.__annotations__} - {"options"}
    # An alias, and one whose only use is to be switched off.
    assert options - VALUES.keys() == {"num_gpus", "tracking"}
    assert VALUES.keys() - options == set()


@pytest.mark.parametrize("name", VALUES)
def test_every_option_of_the_magic_is_in_the_reference(name: str) -> None:
    assert f"`--{name.replace('_', '-')}`" in REFERENCE


@pytest.mark.parametrize(
    ("line", "options", "output"),
    [
        ("", {}, ""),
        ("--gpus 2 --gpu-type CPU -o results", {"gpus": 2, "gpu_type": "CPU"}, "results"),
        ("--gpus=2 --gpu_type=CPU --output=results", {"gpus": 2, "gpu_type": "CPU"}, "results"),
        ("--timeout 60 --grace 1.5 --hang-timeout 9", {"timeout": 60.0, "grace": 1.5, "hang_timeout": 9.0}, ""),
        ("--ranks-log all", {"ranks_log": "all"}, ""),
        ("--ranks-log 0,3", {"ranks_log": [0, 3]}, ""),
        ("--memory 64GiB --quiet --ignore-busy", {"memory": "64GiB", "quiet": True, "ignore_busy": True}, ""),
        ("--tags 'team=a b,job=x=y'", {"tags": {"team": "a b", "job": "x=y"}}, ""),
        ("--secrets A,B", {"secrets": ["A", "B"]}, ""),
    ],
)
def test_a_line_is_read(line: str, options: dict[str, object], output: str) -> None:
    assert parse_line(line) == (options, output)


VALID = ", ".join(["-o NAME", *(f"--{name.replace('_', '-')}" for name in VALUES)])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--gpuz 2", f"%%distributed has no option '--gpuz' (did you mean --gpus?)\nhint: valid options: {VALID}"),
        ("--bogus 2", f"%%distributed has no option '--bogus'\nhint: valid options: {VALID}"),
        ("2", f"%%distributed has no option '2'\nhint: valid options: {VALID}"),
        ("--gpus two", "--gpus needs a whole number, not 'two'"),
        ("--gpus", "--gpus needs a value"),
        ("--gpus --quiet", "--gpus needs a value"),
        ("--quiet=yes", "--quiet takes no value"),
        ("--ranks-log 0,x", "--ranks-log needs all, or ranks such as 0,3, not '0,x'"),
        ("--tags team", "--tags needs pairs such as team=search,job=nightly, not 'team'"),
        ("-o 2x", "-o needs the name of a variable, not '2x'"),
        ("-o class", "-o needs the name of a variable, not 'class'"),
        ("-o", "-o needs a value"),
        ("--gpu-type 'CPU", "the line of %%distributed is invalid: No closing quotation"),
    ],
)
def test_a_wrong_line_is_told_in_words(line: str, told: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        parse_line(line)
    assert str(refused.value) == told
