"""Distil a large text classifier into a small one, DDP."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(nn.Module):
    def __init__(self, vocab, dim, depth, n_classes):
        super().__init__()
        self.embed = nn.EmbeddingBag(vocab, dim)
        self.body = nn.Sequential(*[
            layer for _ in range(depth) for layer in (nn.Linear(dim, dim), nn.ReLU())])
        self.out = nn.Linear(dim, n_classes)

    def forward(self, tokens):
        return self.out(self.body(self.embed(tokens)))


class Distiller:
    def __init__(self, local_rank, temperature=3.0, alpha=0.7):
        self.device = torch.device("cuda", local_rank)
        self.temperature, self.alpha = temperature, alpha
        # in the real run its weights are read from the best checkpoint
        teacher = Classifier(500, 128, 4, 6).to(self.device).eval()
        teacher.requires_grad_(False)
        student = Classifier(500, 32, 1, 6).to(self.device)
        self.teacher = self.wrap(teacher, local_rank)
        self.student = self.wrap(student, local_rank)
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=1e-3)

    @staticmethod
    def wrap(model, local_rank):
        return DistributedDataParallel(model, device_ids=[local_rank])

    def loss(self, tokens, labels):
        with torch.no_grad():
            soft = F.softmax(self.teacher(tokens) / self.temperature, dim=1)
        logits = self.student(tokens)
        kd = F.kl_div(F.log_softmax(logits / self.temperature, dim=1), soft,
                      reduction="batchmean") * self.temperature ** 2
        return self.alpha * kd + (1 - self.alpha) * F.cross_entropy(logits, labels)

    def step(self, tokens, labels):
        loss = self.loss(tokens.to(self.device), labels.to(self.device))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    torch.manual_seed(123)
    tokens = torch.randint(0, 500, (128, 20))
    labels = tokens[:, 0] % 6
    data = TensorDataset(tokens, labels)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    distiller = Distiller(local_rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        distiller.student.train()
        losses = [distiller.step(x, y) for x, y in loader]
        if local_rank == 0:
            print(f"epoch {epoch}: {sum(losses) / len(losses):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
