"""MAML on sine waves with functional fast weights."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call


class SineTasks:
    def __init__(self, shots, device):
        self.shots, self.device = shots, device

    def sample(self):
        amplitude = 0.1 + 4.9 * torch.rand(1)
        phase = math.pi * torch.rand(1)
        x = 10 * torch.rand(2 * self.shots, 1) - 5
        y = amplitude * torch.sin(x - phase)
        x, y = x.to(self.device), y.to(self.device)
        return (x[: self.shots], y[: self.shots]), (x[self.shots :], y[self.shots :])


class MAML:
    def __init__(self, model, inner_lr, outer_lr, inner_steps):
        self.model = model
        self.inner_lr = inner_lr
        self.inner_steps = inner_steps
        self.meta_optimizer = torch.optim.Adam(model.parameters(), lr=outer_lr)

    def adapt(self, x, y):
        fast = dict(copy.deepcopy(self.model).named_parameters())
        for _ in range(self.inner_steps):
            loss = F.mse_loss(functional_call(self.model, fast, (x,)), y)
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: w - self.inner_lr * g for (name, w), g in zip(fast.items(), grads)}
        return fast

    def meta_step(self, tasks):
        self.meta_optimizer.zero_grad()
        meta_loss = 0.0
        for (support_x, support_y), (query_x, query_y) in tasks:
            fast = self.adapt(support_x, support_y)
            meta_loss = meta_loss + F.mse_loss(functional_call(self.model, fast, (query_x,)), query_y)
        meta_loss = meta_loss / len(tasks)
        meta_loss.backward()
        self.meta_optimizer.step()
        return meta_loss.item()


def build_model(hidden=40):
    return nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sampler = SineTasks(shots=10, device=device)
    maml = MAML(build_model().to(device), inner_lr=0.01, outer_lr=1e-3, inner_steps=2)
    for iteration in range(10):
        tasks = [sampler.sample() for _ in range(4)]
        loss = maml.meta_step(tasks)
        print(f"iteration {iteration} meta loss {loss:.4f}")


if __name__ == "__main__":
    main()
