"""A model of 70 billion weights, tuned by LoRA on eight GPUs of 80 GB, rehearsed from its config alone."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rehearse = Callable[..., dict[str, Any]]
WEIGHTS = 70_553_706_496
GPU = 80 * 2**30
HERE = 1_500_000_000
"""Bytes that a rehearsal may take of this machine."""

TRAIN = """
    import resource
    import sys
    import torch
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    sharded = sys.argv[2] == "sharded"
    if sharded:
        dist.init_process_group("nccl")
        torch.cuda.set_device(0)
    spread = {} if sharded else {"device_map": "auto"}
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16, **spread)
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
    ids = torch.randint(0, 128256, (1, 2048), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    print("resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sharded", "split"])
def test_it_fits_and_so_does_the_rehearsal(rehearse: Rehearse, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    shape = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "vocab_size": 128256}
    more = {"num_key_value_heads": 8, "intermediate_size": 28672, "dtype": "bfloat16"}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape, **more}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(TRAIN))
    ranks = 8 if way == "sharded" else None
    report = rehearse(
        str(path), str(folder), way, ranks=ranks, timeout=540, gpus=8, memory_bytes=GPU, shapes_only=True
    )
    assert report["verdict"] == "clean", report["text"]
    peaks = [figures["peak_bytes"] for figures in report["memory"].values()]
    assert len(peaks) == 8
    assert sum(peaks) > 2 * WEIGHTS
    assert max(peaks) < GPU // 2
    found = re.search(r"resident (\d+)", report["stdout"])
    assert found is not None
    assert int(found[1]) < HERE
    assert bool(report["collectives"]) == (way == "sharded")
