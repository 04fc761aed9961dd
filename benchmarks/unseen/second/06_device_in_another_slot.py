import copy
import random
from collections import deque

import torch
import torch.nn.functional as F
from torch import nn


class QNet(nn.Module):
    def __init__(self, obs_dim, n_actions, hidden=64, dueling=False, device="cpu"):
        super().__init__()
        self.dueling = bool(dueling)
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.advantage = nn.Linear(hidden, n_actions)
        self.value = nn.Linear(hidden, 1)
        self.to(device)

    def forward(self, obs):
        h = self.body(obs)
        q = self.advantage(h)
        if self.dueling:
            q = q - q.mean(-1, keepdim=True) + self.value(h)
        return q


class Agent:
    def __init__(self, cfg, device):
        self.cfg, self.device = cfg, device
        self.q_net = QNet(cfg["obs_dim"], cfg["n_actions"], cfg["hidden"], device)
        self.target_net = copy.deepcopy(self.q_net)
        self.optimizer = torch.optim.Adam(self.q_net.parameters(), lr=cfg["lr"])
        self.memory = deque(maxlen=500)

    def update(self):
        batch = random.sample(self.memory, self.cfg["batch_size"])
        obs, action, reward, next_obs = (torch.stack(t).to(self.device) for t in zip(*batch))
        with torch.no_grad():
            target = reward + self.cfg["gamma"] * self.target_net(next_obs).amax(1)
        q = self.q_net(obs).gather(1, action[:, None]).squeeze(1)
        loss = F.smooth_l1_loss(q, target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


CONFIG = dict(obs_dim=4, n_actions=2, hidden=32, lr=1e-3, gamma=0.99, batch_size=16)

if __name__ == "__main__":
    agent = Agent(CONFIG, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(64):
        agent.memory.append((torch.randn(4), torch.tensor(random.randrange(2)), torch.rand(()), torch.randn(4)))
    for step in range(10):
        loss = agent.update()
    print("loss", loss)
