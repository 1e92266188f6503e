"""`init=`: the process group is there when the function begins; notes where it or CUDA is not."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import serverless_gpu
from serverless_gpu import distributed
from serverless_gpu.errors import InvalidValue
from serverless_gpu.node.inside.process_group import PROCESS_GROUP_VARIABLE
from tests.support.golden import golden
from tests.support.local.torchrun import torchrun

pytestmark = pytest.mark.usefixtures("warm")


def summed(rank: int = 0) -> tuple[int, str]:
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return int(value), dist.get_backend()


def make_second() -> None:
    dist.init_process_group("gloo")


def ask_cuda() -> None:
    torch.zeros(1, device="cuda")


def told() -> str | None:
    return os.environ.get(PROCESS_GROUP_VARIABLE)


def import_air() -> None:
    importlib.import_module("databricks.air")


def import_data() -> None:
    importlib.import_module("serverless_gpu.data")


def test_23A5_init_makes_the_process_group() -> None:
    function = distributed(gpus=2, gpu_type="H100", init="gloo", quiet=True)(summed)
    assert function.distributed() == [(3, "gloo")] * 2
    assert function.submit().results() == [(3, "gloo")] * 2
    with serverless_gpu.session(gpus=2, gpu_type="H100", init="gloo", quiet=True) as session:
        assert session.distributed(summed) == [(3, "gloo")] * 2


def test_23A5_a_second_process_group_gets_a_note_that_names_init() -> None:
    with pytest.raises(ValueError, match="twice") as caught:
        distributed(gpus=2, gpu_type="H100", init="gloo", quiet=True)(make_second).distributed()
    assert any("init=" in note for note in caught.value.__notes__)


def test_23A5_nccl_without_cuda_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidValue, match="SERVERLESS_GPU_FAKE"):
        distributed(gpus=2, gpu_type="H100", init="nccl", quiet=True)(summed).distributed()
    with pytest.raises(InvalidValue, match="CPU slots"):
        distributed(gpus=2, gpu_type="CPU", init="nccl")
    with pytest.raises(InvalidValue, match=re.escape(golden("local.process_group.nccl-gloo-none"))):
        distributed(gpus=2, init="mpi")  # type: ignore[arg-type]  # what a user may write


def test_23A5_no_process_group_gets_a_note_that_names_both_ways() -> None:
    with pytest.raises(ValueError, match=re.escape(golden("local.process_group.been-initialized"))) as caught:
        distributed(gpus=2, gpu_type="H100", quiet=True)(summed).distributed()
    notes = "\n".join(caught.value.__notes__)
    assert 'init="gloo"' in notes
    assert "torch.distributed.init_process_group" in notes


def test_23A5_declared_gpus_have_no_cuda_and_a_note_says_so() -> None:
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA") as caught:
        distributed(gpus=1, gpu_type="H100", quiet=True)(ask_cuda).distributed()
    assert any("SERVERLESS_GPU_FAKE" in note and "is_available()" in note for note in caught.value.__notes__)
    with pytest.raises((RuntimeError, AssertionError)) as plain:
        distributed(gpus=1, gpu_type="CPU", quiet=True)(ask_cuda).distributed()
    assert not any("SERVERLESS_GPU_FAKE" in note for note in plain.value.__notes__)


def test_23A5_databricks_air_gets_a_note() -> None:
    with pytest.raises(ModuleNotFoundError, match="databricks") as caught:
        distributed(gpus=1, gpu_type="H100", quiet=True)(import_air).distributed()
    assert any(golden("local.process_group.serverless-gpu-import") in note for note in caught.value.__notes__)


def test_23A5_serverless_gpu_data_names_what_to_use() -> None:
    with pytest.raises(ImportError, match=golden("local.process_group.does-exist-version")):
        import_data()
    with pytest.raises(ImportError, match="DistributedSampler"):
        exec("from serverless_gpu import data")
    assert "data" not in dir(serverless_gpu)


@pytest.mark.long  # torch in all ranks, twice
def test_23A5_torchrun_reproduces_a_run_that_has_init(tmp_path: Path) -> None:
    run = distributed(gpus=2, gpu_type="H100", init="gloo", quiet=True)(summed).submit()
    assert run.results() == [(3, "gloo")] * 2
    done = torchrun(run.directory, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 returned (3, 'gloo')" in done.stdout


def test_23A5_a_call_made_by_a_rank_does_not_inherit_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_GROUP_VARIABLE, "gloo")  # as in a rank of a run with init=
    assert distributed(gpus=1, gpu_type="H100", quiet=True)(told).distributed() == [None]


def test_23A5_an_estimate_refuses_nccl_as_the_call_does() -> None:
    with pytest.raises(InvalidValue, match="SERVERLESS_GPU_FAKE"):
        distributed(gpus=2, gpu_type="H100", init="nccl", quiet=True)(summed).estimate()
