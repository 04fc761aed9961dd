"""HSDP for a 7B llama on one node of eight 40 GB cards: copies × shards.

    torchrun --nproc-per-node 8 08_mesh_of_copies_and_shards.py --copies 2
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--copies", type=int, default=2)
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--micro-batch", type=int, default=2)
    p.add_argument("--seq", type=int, default=2048)
    return p.parse_args()


def main():
    a = parse()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world = dist.get_world_size()
    mesh = init_device_mesh("cuda", (a.copies, world // a.copies), mesh_dim_names=("copies", "shards"))

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32,
                                             num_attention_heads=32, vocab_size=32000, use_cache=False))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    model.to_empty(device="cuda")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_(1.0) if name.endswith("norm.weight") else p.normal_(0, 0.02)
        rotary = model.model.rotary_emb
        inv_freq, rotary.attention_scaling = rotary.compute_default_rope_parameters(model.config, device="cuda")
        rotary.inv_freq.copy_(inv_freq)
        if hasattr(rotary, "original_inv_freq"):
            rotary.original_inv_freq.copy_(inv_freq)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model.train()
    for step in range(a.steps):
        ids = torch.randint(0, 32000, (a.micro_batch, a.seq), device="cuda")
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}")
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="hsdp-ckpt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
