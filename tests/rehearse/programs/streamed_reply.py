"""A streamed data set, read by two workers, whose rows name the reply otherwise than its reader does."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

LINES = [{"pixels": torch.rand(6), "meta": {"reply_text": n % 3, "source": "web"}} for n in range(12)]


def reply_of(line):
    inner = line["meta"]
    name = "reply_text" if "fixed" in sys.argv else "replytext"
    return inner[name]  # where, cause


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        for line in LINES[worker.id :: worker.num_workers]:
            yield line["pixels"], reply_of(line)


net = nn.Linear(6, 3).cuda()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for pixels, reply in DataLoader(Stream(), batch_size=3, num_workers=2):
    loss = nn.functional.cross_entropy(net(pixels.cuda()), reply.cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()
print("done", loss.item())
