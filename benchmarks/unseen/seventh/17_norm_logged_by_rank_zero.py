"""7B with FSDP2. Every second step the norm of the output layer goes into the log (rank 0 writes it).

    17_norm_logged_by_rank_zero.py [together]
"""
import logging
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

log = logging.getLogger("train")


def build():
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, vocab_size=32000,
                         use_cache=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def head_norm(model):
    return model.lm_head.weight.detach().full_tensor().norm()


def train(model, together):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for step in range(4):
        ids = torch.randint(0, 32000, (1, 256), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 1:
            if together:
                norm = head_norm(model)
                if dist.get_rank() == 0:
                    log.warning("step %d: |head| = %s", step, norm.item())
            elif dist.get_rank() == 0:
                log.warning("step %d: |head| = %s", step, head_norm(model).item())


if __name__ == "__main__":
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device(f"cuda:{local_rank}"))
    train(build(), "together" in sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
