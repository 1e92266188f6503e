"""Ranks that train without each other: the receipt mentions it, and TrainingArguments join theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from serverless_gpu import distributed
from serverless_gpu.errors import NotPicklable
from serverless_gpu.node.inside.process_group import ALONE_NOTE_SWITCH
from tests.support.golden import golden

pytestmark = pytest.mark.torch


def train(*, join: bool) -> None:
    if join:
        dist.init_process_group("gloo")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    if join:
        dist.destroy_process_group()


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("ranks", "join", "switch", "is_mentioned"),
    [
        (2, False, None, True),
        (2, True, None, False),
        pytest.param(2, False, "0", False, marks=pytest.mark.long),
        pytest.param(1, False, None, False, marks=pytest.mark.long),
    ],
)
def test_23A1_the_receipt_mentions_ranks_that_trained_without_each_other(
    ranks: int, join: bool, switch: str | None, is_mentioned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switch is not None:
        monkeypatch.setenv(ALONE_NOTE_SWITCH, switch)
    run = distributed(gpus=ranks, quiet=True)(train).submit(join=join)
    run.results()
    assert any(golden("local.training_alone.ranks-trained-none") in note for note in run.receipt().notes) is (
        is_mentioned
    )


@pytest.mark.heavy
@pytest.mark.spot
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm")
def test_23A1_captured_training_arguments_train_one_model(tmp_path: Path) -> None:
    import transformers  # noqa: PLC0415 - of the examples extra

    args = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=3, save_strategy="no", disable_tqdm=True
    )
    assert args.world_size == 1

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layer(x)
            return {"loss": ((predicted - labels) ** 2).mean(), "logits": predicted}

    @distributed(gpus=2, quiet=True)
    def fit(rank: int = 0) -> tuple[int, int, float]:
        data: Any = [{"x": torch.tensor([float(n + rank)]), "labels": torch.tensor([2.0 * n])} for n in range(64)]
        model = Model()
        transformers.Trainer(model=model, args=args, train_dataset=data).train()
        return args.world_size, args.process_index, float(model.layer.weight.detach())

    (size, index, weight), (other_size, other_index, other_weight) = fit.distributed()
    assert (size, other_size, index, other_index) == (2, 2, 0, 1)
    assert weight == other_weight


@pytest.mark.heavy
@pytest.mark.usefixtures("warm")
def test_23A1_a_real_accelerator_is_refused_with_the_way_to_it() -> None:
    import accelerate  # noqa: PLC0415 - of the examples extra

    accelerator = accelerate.Accelerator(cpu=True)

    @distributed(gpus=2, quiet=True)
    def fit() -> int:
        return int(accelerator.num_processes)

    with pytest.raises(NotPicklable, match=golden("local.training_alone.closure-variable-accelerator")):
        fit.distributed()
