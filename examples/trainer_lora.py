"""Pre-train a tiny Llama with the Hugging Face Trainer, then teach it another language with LoRA.

    python examples/trainer_lora.py          needs torch, transformers, peft; about 25 seconds on two cores

The model is made from a configuration and reads bytes, so nothing is downloaded. First it learns Python, from the
standard library's sources; then its weights are frozen, and adapters with a few per cent of their number learn the
English of the language reference (what `help("for")` prints). `Trainer` finds the ranks by itself. Two GPUs where there
are two, otherwise two CPU slots.
"""

import sysconfig
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from serverless_gpu import distributed

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots
CONTEXT = 64  # bytes the model sees at once


class Bytes(Dataset):
    """A text in pieces of CONTEXT bytes; a byte is its own token, and the model shifts the labels itself."""

    def __init__(self, text):
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def load_texts():
    """Return Python code and English prose, and some prose that is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = b"".join(file.read_bytes() for file in files)
    prose = "\n".join(topics.values()).encode()
    return Bytes(code), Bytes(prose[:-32_000]), Bytes(prose[-32_000:])


def fit(model, data, held_out, folder, **settings):
    """Train with the Trainer; return the loss on the held-out text before and after."""
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_steps=100,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=held_out)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


@distributed(gpus=2, gpu_type=GPU_TYPE, tags={"example": "trainer-lora"})
def train(folder):
    set_seed(0)
    code, prose, held_out = load_texts()
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    )
    untrained, pretrained = fit(base, code, held_out, folder, max_steps=300, learning_rate=1e-2)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(base, adapters)
    model.print_trainable_parameters()
    _, adapted = fit(model, prose, held_out, folder, max_steps=200, learning_rate=1e-2)
    return {"untrained": untrained, "pretrained": pretrained, "adapted": adapted}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        losses = train.distributed(folder)[0]
    print("loss on English prose, nats per byte:")
    for model, loss in losses.items():
        print(f"  {model:10} {loss:.2f}")
