import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def read_sessions(n=60):
    generator = torch.Generator().manual_seed(5)
    for i in range(n):
        items = torch.randint(0, 30 + i % 2 * 17, (6,), generator=generator)
        yield [f"item_{j}" for j in items.tolist()]


class Vocabulary:
    def __init__(self, sessions):
        items = sorted({item for session in sessions for item in session})
        self.index = {item: i for i, item in enumerate(items)}

    def __len__(self):
        return len(self.index)

    def encode(self, session):
        return torch.tensor([self.index[item] for item in session])


class SessionRec(nn.Module):
    def __init__(self, items, dim=16):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)

    def forward(self, session):
        _, h = self.rnn(self.items(session))
        return h[-1] @ self.items.weight.t()


def main():
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    sessions = [s for i, s in enumerate(read_sessions()) if i % world == rank]
    vocabulary = Vocabulary(sessions)
    rows = torch.stack([vocabulary.encode(s) for s in sessions])
    torch.manual_seed(0)
    model = DDP(SessionRec(len(vocabulary)).cuda(), device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(2):
        for batch in rows.split(10):
            batch = batch.cuda()
            loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
