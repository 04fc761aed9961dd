"""FSDP2 over four ranks: validates, keeps its shards by DCP, and a new model goes on from them."""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def made():
    net = nn.Sequential(nn.Embedding(1000, 256), *(nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
                                                  for _ in range(3)), nn.Linear(256, 1000)).cuda()
    for layer in net:
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def train(net, opt):
    net.train()
    for _ in range(2):
        ids = torch.randint(0, 1000, (2, 32), device="cuda")
        nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


net, opt = made()
train(net, opt)
net.eval()
with torch.no_grad():
    net(torch.randint(0, 1000, (8, 32), device="cuda"))
weights, state = get_state_dict(net, opt)
dcp.save({"model": weights, "opt": state}, checkpoint_id="in-parts")
del net, opt
net, opt = made()
train(net, opt)
weights, state = get_state_dict(net, opt)
dcp.load({"model": weights, "opt": state}, checkpoint_id="in-parts")
set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)
train(net, opt)
dist.destroy_process_group()
