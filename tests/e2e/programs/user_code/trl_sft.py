"""Fine-tunes with TRL's SFTTrainer; arguments, data, model and tokenizer were made in the caller and are captured."""

import datasets
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from serverless_gpu import distributed

WORDS = ["<pad>", "<eos>", "one", "two", "three", "four", "five", "six"]
inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
data = datasets.Dataset.from_dict({"text": [" ".join(WORDS[2 + n % 3 : 5 + n % 3]) for n in range(16)]})
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=16, **sizes))
args = SFTConfig(
    output_dir="sft",
    use_cpu=True,
    bf16=False,
    report_to=[],
    max_steps=2,
    max_length=8,
    per_device_train_batch_size=2,
    logging_steps=1,
    save_strategy="no",
    disable_tqdm=True,
    learning_rate=1e-2,
)


@distributed(gpus=2, gpu_type="CPU", quiet=True)
def train():
    trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return args.world_size, args.process_index, all(torch.equal(weights, other) for other in everywhere), losses


if __name__ == "__main__":
    results = train.distributed()
    assert [result[:3] for result in results] == [(2, 0, True), (2, 1, True)], results
    assert len(results[0][3]) == 2 and args.world_size == 1, results
    print("done")
