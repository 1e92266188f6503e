"""The Trainer with settings from HfArgumentParser, a callback, metrics, checkpoints and a resumed training."""

import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from serverless_gpu import distributed


@dataclass
class ModelArguments:
    width: int = 16


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input_ids": torch.tensor([index % 2 + 1] * 4), "labels": index % 2}


class Epochs(TrainerCallback):
    def __init__(self):
        self.count = 0

    def on_epoch_end(self, args, state, control, **kwargs):
        self.count += 1


def accuracy(predicted):
    return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train(model_args, args, resume):
    config = BertConfig(
        vocab_size=8,
        hidden_size=model_args.width,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    epochs = Epochs()
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=Texts(),
        eval_dataset=Texts(),
        compute_metrics=accuracy,
        callbacks=[epochs],
    )
    trainer.train(resume_from_checkpoint=resume)
    metrics = trainer.evaluate()
    return args.world_size, trainer.state.global_step, epochs.count, metrics["eval_accuracy"]


if __name__ == "__main__":
    parser = HfArgumentParser((ModelArguments, TrainingArguments))
    options = (
        "--output_dir out --use_cpu --report_to none --num_train_epochs 2 --learning_rate 0.01 --disable_tqdm true"
    )
    options += " --save_strategy epoch --per_device_train_batch_size 4"
    model_args, args = parser.parse_args_into_dataclasses([*options.split(), *sys.argv[1:]])
    results = train.distributed(model_args, args, None)
    assert results == [(2, 8, 2, 1.0)] * 2, results
    assert sorted(os.listdir("out")) == ["checkpoint-4", "checkpoint-8"]
    args.num_train_epochs = 3
    results = train.distributed(model_args, args, True)
    assert results == [(2, 12, 1, 1.0)] * 2, results
    print("done")
