"""Train a small character GPT on the sources of Python's own standard library, and let it write some Python.

    python examples/char_gpt.py          needs torch; about 20 seconds on two cores

Two ranks with DistributedDataParallel: two GPUs where there are two, otherwise two CPU slots. The score is the loss on
modules that were held out, in nats per character. It starts at ln 128 = 4.85; below 2.0 the model has learned
indentation, keywords and what a definition looks like. For sense it would take more than these few seconds.
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from serverless_gpu import distributed
from serverless_gpu import runtime as rt

GPU_TYPE = None if torch.cuda.device_count() >= 2 else "CPU"  # two GPUs where there are two, else CPU slots

CHARACTERS = 128  # a character is its ASCII code
CONTEXT = 64  # characters the model sees at once
WIDTH, HEADS, LAYERS = 64, 4, 3


class Block(nn.Module):
    """Attention, then a small network, each added to what came in."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS))
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x):
        return self.head(self.blocks(self.characters(x) + self.positions.weight[: x.shape[1]]))

    @torch.no_grad()
    def write(self, prompt, length):
        """Continue a text, one character drawn after the other."""
        x = torch.tensor([list(prompt.encode("ascii"))], device=self.positions.weight.device)
        for _ in range(length):
            logits = self(x[:, -CONTEXT:])[:, -1] / 0.7  # a little surer than it is
            x = torch.cat([x, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return bytes(x[0].tolist()).decode("ascii")


def load_sources():
    """Return the top-level modules as two tensors of characters: to train on, and every twentieth to score with."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::20]
    return read([file for file in files if file not in held_out]), read(held_out)


def read(files):
    text = bytearray(b"".join(file.read_bytes() for file in files))
    characters = torch.frombuffer(text, dtype=torch.uint8).long()
    return characters[characters < CHARACTERS]


def draw(characters, count):
    """Return random windows of a text, and the same windows one character later."""
    starts = torch.randint(len(characters) - CONTEXT, (count, 1), device=characters.device)
    windows = characters[starts + torch.arange(CONTEXT + 1, device=characters.device)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@distributed(gpus=2, gpu_type=GPU_TYPE, tags={"example": "char-gpt"})
def train(steps=500, batch_size=16, learning_rate=1e-2):
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", rt.get_local_rank()) if cuda else torch.device("cpu")
    sources, held_out = (characters.to(device) for characters in load_sources())

    torch.manual_seed(rt.get_global_rank())  # each rank draws its own batches; DDP copies the weights of rank 0
    gpt = GPT().to(device)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        loss = loss_of(model, draw(sources, batch_size))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.2f}")

    with torch.no_grad():
        score = loss_of(gpt, draw(held_out, 256))
    dist.all_reduce(score)  # of different windows on each rank
    dist.destroy_process_group()
    return score.item() / rt.get_world_size(), gpt.write("\ndef ", 300)


if __name__ == "__main__":
    loss, sample = train.distributed()[0]
    print(sample)
    print(f"loss on held-out modules: {loss:.2f} nats per character")
