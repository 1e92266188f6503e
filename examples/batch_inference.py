"""Put every line of a text file through a model, one chunk of lines per run, each run on one GPU; then search in it.

    python examples/batch_inference.py [FILE]          needs torch; about 10 seconds on two cores

Without a file it takes what Python's standard library says about its own functions, one per line. The model gives texts
with related words vectors that are near each other; it is trained first, in a run of its own, and its weights then go
with every chunk. There are as many chunks at a time as GPUs (or CPU slots), and the results come back in the order of
the file, whichever run ends first.
"""

import ast
import re
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from serverless_gpu import distributed

GPU_TYPE = None if torch.cuda.device_count() else "CPU"  # GPUs where there are any, else CPU slots
CHUNK = 500  # lines per run
WORDS, LONGEST, WIDTH = 2**14, 40, 128  # different words, words of a text, numbers in its vector
QUESTIONS = ["compress bytes", "wait for a child process to end", "pick a random element of a list"]


class Embedder(nn.Module):
    """The vector of a text: the mean of the vectors of its words, at length 1."""

    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=0)

    def forward(self, words):
        return F.normalize(self.words(words))


def to_words(texts):
    """Return the words of each text as numbers, one row per text, filled up with 0."""
    table = torch.zeros(len(texts), LONGEST, dtype=torch.long)
    for row, text in zip(table, texts, strict=True):
        words = re.findall(r"[a-z]+", text.lower())[:LONGEST]
        row[: len(words)] = torch.tensor([1 + zlib.crc32(word.encode()) % (WORDS - 1) for word in words])
    return table


@distributed(gpus=1, gpu_type=GPU_TYPE, tags={"example": "batch-inference"})
def train(texts, epochs=30, batch_size=256, learning_rate=1e-2):
    """Learn which words go together: each text is torn in two, and a half has to find the other half in its batch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    words, model = to_words(texts).to(device), Embedder().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for epoch in range(1, epochs + 1):
        for batch in torch.randperm(len(words), device=device).split(batch_size):
            half = torch.rand(len(batch), LONGEST, device=device) < 0.5
            similarity = model(words[batch] * half) @ model(words[batch] * ~half).T
            loss = F.cross_entropy(similarity / 0.05, torch.arange(len(batch), device=device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.2f}")
    return model.cpu().state_dict()


@distributed(gpus=1, gpu_type=GPU_TYPE, tags={"example": "batch-inference"})
def embed(texts, weights):
    """Return one vector per text."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Embedder().to(device)
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(to_words(texts).to(device)).cpu()


def describe_standard_library(file):
    """Write one line per function and class: its name, and the first paragraph of its docstring."""
    with file.open("w", encoding="utf-8") as lines:
        for module in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
            for node in ast.walk(ast.parse(module.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    print(f"{module.stem}.{node.name}:", *text.split("\n\n")[0].split(), file=lines)
    return file


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        file = Path(sys.argv[1]) if len(sys.argv) > 1 else describe_standard_library(Path(folder, "texts.txt"))
        texts = file.read_text("utf-8").splitlines()

    weights = train.distributed(texts)[0]
    chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
    runs = embed.map(chunks, weights=weights)
    vectors = torch.cat([run.result() for run in runs])
    print(f"{len(vectors)} texts in {len(runs)} runs")

    answers = (embed(QUESTIONS, weights) @ vectors.T).topk(3).indices  # a plain call: in this process
    for question, nearest in zip(QUESTIONS, answers.tolist(), strict=True):
        print(f"\n{question}?")
        for index in nearest:
            print(f"    {texts[index][:100]}")
