"""Fine-tune a Llama with the Hugging Face Trainer, in less memory than its weights take: layers stream, under a budget.

python examples/fine_tune_trainer.py                                  # 3.2 billion parameters, random ones, on a GPU
python examples/fine_tune_trainer.py --config config.json --budget 8GiB --accumulate 4
python examples/fine_tune_trainer.py --tiny                           # a small model, on any machine: shows how, not how fast

The weights are made on the CPU, in bfloat16, and trained there by AdamW; each layer is copied to the GPU just ahead of its use,
and its gradients come back. What the step takes on the GPU beside that is kept to the budget. Nothing is downloaded: the
data counts upward, so that there is something to learn. Needs: pip install "transformers>=4.50" accelerate
"""

import argparse
import tempfile

import torch
import transformers

import memkit
from memkit.integrations import MemkitCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--config", help="a JSON file with the configuration of a Llama; by default that of Llama 3.2 3B")
parser.add_argument("--ratio", type=float, default=1.0, help="the share of the layers' bytes that streams")
parser.add_argument("--budget", help='for all that is on the GPU; "12GiB" by default, or "2MiB" with --tiny')
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, help="tokens in a sequence: 1024 by default, or 16 with --tiny")
parser.add_argument("--accumulate", type=int, default=1, help="batches per step of the optimizer")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--output", help="where to write checkpoints; by default nowhere")
parser.add_argument("--resume", help="a checkpoint in there to go on from")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

if not options.tiny and not torch.cuda.is_available():
    print("No GPU here: running the tiny version on the CPU, which stands in for one.")
    options.tiny = True

if options.config is not None:
    config = transformers.LlamaConfig.from_json_file(options.config)
elif options.tiny:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
else:
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
settings = {"device": memkit.device.ReferenceDevice()} if options.tiny else {}
budget = options.budget or ("2MiB" if options.tiny else "12GiB")
length = options.length or (16 if options.tiny else 1024)

torch.manual_seed(0)
dtype = torch.float32 if options.tiny else torch.bfloat16
model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # on the CPU
weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
starts = torch.randint(config.vocab_size, (options.steps * options.accumulate * options.batch, 1))
rows = (starts + torch.arange(length)) % config.vocab_size

offload = memkit.LayerOffload(model, offload_ratio=options.ratio, **settings)
kept_to = memkit.MemoryBudget(budget, min_bytes=1024 if options.tiny else "1MiB", **settings)
print(offload.plan.explain(), end="\n\n")

with tempfile.TemporaryDirectory() as folder, MemkitCallback(offload, kept_to) as callback:
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            options.output or folder,
            use_cpu=options.tiny,
            per_device_train_batch_size=options.batch,
            gradient_accumulation_steps=options.accumulate,
            max_steps=options.steps,
            learning_rate=3e-3 if options.tiny else 1e-4,
            logging_steps=1,
            save_strategy="no" if options.output is None else "steps",
            save_steps=max(1, options.steps // 2),
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    stats = offload.stats()

losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print(f"\n{stats}\n\nloss: {losses[0]:.3f} to {losses[-1]:.3f}\nweights: {weights_bytes / 2**20:.1f} MiB")
if torch.cuda.is_available() and not options.tiny:
    print(f"peak on the GPU: {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
