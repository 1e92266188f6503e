"""Ways of use that run on this machine and through a server, with the same outcome."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from serverless_gpu import distributed
from serverless_gpu import runtime as rt
from serverless_gpu.compute import GPUType
from serverless_gpu.errors import (
    ArgumentMismatch,
    InvalidOption,
)
from serverless_gpu.launcher import distributed as launcher_distributed

NUM_WORKERS = 2


@distributed(
    gpus=8,
    gpu_type="h100",
)
def hello_world(name: str) -> int:
    """Return the global rank of each process."""
    if rt.get_local_rank() == 0:
        print("hello", name)
    return rt.get_global_rank()


def usage_1_starter(capsys: pytest.CaptureFixture[str]) -> None:
    result = hello_world.distributed("SGC")
    assert result == [0, 1, 2, 3, 4, 5, 6, 7]
    assert "[rank 0] hello SGC\n" in capsys.readouterr().out


def setup() -> None:
    """Join the group, as the tutorial's notebook-level helper does."""
    dist.init_process_group("gloo")


def cleanup() -> None:
    """Leave it."""
    dist.destroy_process_group()


class SimpleMLP(nn.Module):
    """A small model."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        return out


@distributed(gpus=2, gpu_type="H100", quiet=True)
def run_train(num_epochs: int, batch_size: int) -> None:
    """Train with DistributedDataParallel."""
    setup()
    device = torch.device("cpu", 0) if not torch.cuda.is_available() else torch.device(int(os.environ["LOCAL_RANK"]))
    model = DistributedDataParallel(SimpleMLP().to(device))
    data = TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own gap
            optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    same = weights.clone()
    dist.broadcast(same, src=0)
    assert torch.equal(weights, same), "every rank ends with the same weights"
    # torch 2.13 can hang for ever when the last reference to a group goes after its end (under the GIL, which the
    # group's own thread wants); it does so in a plain fork, too.
    dist.barrier()
    del model, optimizer
    cleanup()


def usage_2_ddp_with_keywords_and_module_level_helpers() -> None:
    assert run_train.distributed(num_epochs=1, batch_size=4) == [None] * 2


def usage_3_fsdp_with_a_default_from_a_constant_and_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    learning_rate = 0.1

    @distributed(gpus=NUM_WORKERS, gpu_type=GPUType.H100, quiet=True)
    def train(num_workers: int = NUM_WORKERS) -> dict[str, object]:
        rank = int(os.environ.get("RANK", "0"))
        size = int(os.environ.get("WORLD_SIZE", str(num_workers)))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        dcp.state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
        dist.destroy_process_group()
        return {"losses": losses, "rank": rank, "local": local, "where": checkpoint, "ok": True}

    result = train.distributed()
    assert [entry["rank"] for entry in result] == [entry["local"] for entry in result] == [0, 1]
    first = next(entry for entry in result if entry["rank"] == 0)
    assert first["ok"] is True and first["where"] == checkpoint and (tmp_path / "checkpoint" / ".metadata").exists()


def usage_4_everything_imported_inside_and_the_result_ignored(tmp_path: Path) -> None:
    target = str(tmp_path)

    @distributed(gpus=8, gpu_type="H100", quiet=True)
    def train() -> None:
        import os  # noqa: PLC0415 - the way of use under test
        import pathlib  # noqa: PLC0415

        os.environ.setdefault("NCCL_DEBUG", "WARN")
        os.environ.setdefault("MASTER_ADDR", "elsewhere")
        assert os.environ["MASTER_ADDR"] == "127.0.0.1" and int(os.environ["MASTER_PORT"]) > 0
        if int(os.environ["RANK"]) == 0:
            pathlib.Path(target, "model").write_text("trained")

    train.distributed()
    assert (tmp_path / "model").read_text() == "trained"
    assert "NCCL_DEBUG" not in os.environ


def usage_5_objects_captured_from_the_notebook() -> None:
    training_args = {"lr": 1e-4, "steps": [1, 2]}
    dataset = torch.arange(8)

    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    tokenizer = Tokenizer()

    @distributed(gpus=8, gpu_type="H100", quiet=True)
    def run() -> list[object]:
        rank = rt.get_global_rank()
        return [training_args["lr"], tokenizer.encode("ab"), int(dataset[rank])]

    results = run.distributed()
    assert results
    assert results == [[1e-4, [97, 98], rank] for rank in range(8)]


class Config(dict[str, object]):
    """A dictionary whose keys are attributes, as configuration libraries have them."""

    def __getattr__(self, name: str) -> object:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value


def usage_6_a_config_object_that_the_function_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_secret"
    monkeypatch.delenv("HF_TOKEN", raising=False)

    @launcher_distributed(gpus=2, gpu_type=GPUType.H100, remote=False, quiet=True)
    def run(cfg: Config) -> str | None:
        os.environ["HF_TOKEN"] = token
        cfg.output_dir = f"{cfg.base}/rank{os.environ['RANK']}"
        return f"run-{len(str(cfg.output_dir))}" if rt.get_global_rank() == 0 else None

    config = Config(base="/out", nested={"layers": [1, 2]})
    result = run.distributed(config)
    assert result[0] == "run-10" and result[1:] == [None]
    assert "output_dir" not in config and "HF_TOKEN" not in os.environ
    assert next(r for r in result if r) == "run-10"


def without_arguments_every_gpu_is_used() -> None:
    @distributed()
    def size() -> int:
        return rt.get_world_size()

    assert len(size.distributed()) == 8


def the_negative_corpus_gets_a_clear_type_error() -> None:
    def train(lr: float) -> float:
        return lr

    with pytest.raises(TypeError, match="min_workers"):
        distributed(gpus=8, min_workers=2)  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(InvalidOption, match=r"valid options: .*gpus"):
        distributed(num_gpus_per_worker=1)  # type: ignore[call-arg]  # the mistake under test
    decorated = distributed(gpus=2, gpu_type="H100")(train)
    with pytest.raises(ArgumentMismatch, match="missing lr"):
        decorated.distributed()  # type: ignore[call-arg]  # the mistake under test
    with pytest.raises(TypeError, match="1 positional argument"):
        decorated.distributed(0.1, 0.2)  # type: ignore[call-arg]  # the mistake under test
    assert distributed(num_gpus=2, quiet=True)(train).distributed(0.1) == [0.1, 0.1]
