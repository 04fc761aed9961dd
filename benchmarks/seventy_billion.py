"""A plain script: one LoRA step of a model of 70 billion weights on eight GPUs, sharded by FSDP2 or split by layers.

    trimtab rehearse --gpus 8xH100-80GB --shapes-only torchrun --nproc_per_node 8 benchmarks/seventy_billion.py sharded
    trimtab rehearse --gpus 8xH100-80GB --shapes-only benchmarks/seventy_billion.py split

Or the same model through `trimtab train`, with 400 rows of its own:

    python benchmarks/seventy_billion.py config FOLDER
    trimtab rehearse --gpus 8xH100-80GB FOLDER/config.yaml

The model's config is written to a temporary folder, or to FOLDER; there are no weights, and shapes need none.
"""

import json
import random
import resource
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


def main() -> None:
    if sys.argv[1] == "config":
        return write_config(Path(sys.argv[2]).resolve())
    sharded = sys.argv[1] == "sharded"
    folder = Path(tempfile.mkdtemp(prefix="seventy-billion-"))
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    if sharded:
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
    spread = {} if sharded else {"device_map": "auto"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **spread)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    if sharded:
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mp_policy=half)
        fully_shard(model, mp_policy=half)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(0, CONFIG["vocab_size"], (1, 2048), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    print("resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def write_config(folder: Path) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    draw = random.Random(70)
    words = "a model of many layers is laid over all devices that are there"
    rows = [
        {
            "prompt": " ".join(draw.choices(words.split(), k=200)),
            "completion": " ".join(draw.choices(words.split(), k=count)),
        }
        for count in (draw.randrange(50, 1200) for _ in range(400))
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings = {
        "recipe": "sft",
        "model": str(folder / "model"),
        "data": {"source": str(folder / "rows.jsonl"), "max_length": 1024},
        "sharding": True,
        "training": {"epochs": 1, "batch_size": 2},
        "output_dir": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
