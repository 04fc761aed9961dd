"""What fitcheck-llm, a closed formula over a model's config, says of the cases of `memory_peaks.py` that it knows.

    pip install fitcheck-llm && python benchmarks/memory_peer.py --out fitcheck.json

Its figure is a total with what CUDA and the allocator hold besides. It knows decoders alone; compiled code, Liger and
accumulated gradients are nothing that it can be told.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from fitcheck.config_parser import ModelConfig
from fitcheck.estimator import TrainingConfig, estimate
from fitcheck.gpu_db import GPU_DB
from memory_cases import CASES, RUNS, Case, Run
from transformers import AutoConfig, AutoModelForCausalLM

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model_of(case: Case | Run) -> ModelConfig:
    config = AutoConfig.for_model(case.family, **case.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heads = config.num_attention_heads
    return ModelConfig(
        name=case.family,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        intermediate_size=getattr(config, "intermediate_size", 4 * config.hidden_size),
        vocab_size=config.vocab_size,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        tie_word_embeddings=bool(config.tie_word_embeddings),
    )


def training_of(case: Case | Run) -> TrainingConfig:
    if isinstance(case, Run):
        quantize = case.settings.get("model", {}).get("quantize")
        full = case.settings.get("method") == "full"
        return TrainingConfig(
            precision="fp32" if full else "bf16",
            quantization=quantize or "none",
            double_quant=quantize == "nf4",
            batch_size=case.batch,
            seq_len=case.length,
            lora_rank=None if full else 16,
            lora_targets=ALL,
            grad_checkpoint=case.settings.get("training", {}).get("gradient_checkpointing", False),
            flash_attn=True,
        )
    return TrainingConfig(
        precision="fp32" if case.weights == "float32" else "bf16",
        optimizer={"sgd": "sgd-momentum", "adamw_8bit": "adam8bit"}.get(case.optimizer, "adamw"),
        optimizer_dtype="fp32" if case.weights == "float32" or case.method == "lora" else "bf16",
        batch_size=case.batch,
        seq_len=case.length,
        lora_rank=case.rank if case.method == "lora" else None,
        lora_targets=list(case.targets) or ALL,
        grad_checkpoint=case.checkpointing,
        flash_attn=case.attention == "sdpa",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told: dict[str, int] = {}
    for name, case in (CASES | RUNS).items():
        if isinstance(case, Case) and case.auto != "AutoModelForCausalLM":
            continue
        if isinstance(case, Run) and case.settings.get("recipe"):
            continue
        report = estimate(model_of(case), training_of(case), GPU_DB["h200"])
        told[name] = int(report.total_mib * 2**20)
        print(f"{name}: {report.total_mib / 1024:.1f} GiB")
    if options.out is not None:
        options.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
