import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

HP = {"gamma": 0.95, "rollout": 32, "updates": 8, "lr": 3e-3, "entropy": 0.01, "value": 0.5, "clip": 0.5}


class Corridor:
    """Walk right to the goal; reward 1 at the end, a small cost for each move."""

    def __init__(self, length=6):
        self.length = length
        self.pos = 0

    def observe(self):
        obs = np.zeros(self.length, dtype=np.float32)
        obs[self.pos] = 1.0
        return obs

    def reset(self):
        self.pos = 0
        return self.observe()

    def step(self, action):
        self.pos = max(0, self.pos + (1 if action == 1 else -1))
        done = self.pos == self.length - 1
        return self.observe(), 1.0 if done else -0.02, done


class ActorCritic(nn.Module):
    def __init__(self, obs_dim, actions, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh())
        self.policy = nn.Linear(hidden, actions)
        self.value = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.policy(h), self.value(h)


def collect(env, obs, net, device):
    states, actions, rewards, dones = [], [], [], []
    for _ in range(HP["rollout"]):
        with torch.no_grad():
            logits, _ = net(torch.from_numpy(obs).to(device).unsqueeze(0))
        action = Categorical(logits=logits).sample().item()
        states.append(obs)
        obs, reward, done = env.step(action)
        actions.append(action)
        rewards.append(reward)
        dones.append(done)
        if done:
            obs = env.reset()
    with torch.no_grad():
        running = net(torch.from_numpy(obs).to(device).unsqueeze(0))[1].item()
    returns = []
    for reward, done in zip(reversed(rewards), reversed(dones)):
        running = reward + HP["gamma"] * running * (1.0 - float(done))
        returns.insert(0, running)
    batch = (torch.from_numpy(np.stack(states)), torch.tensor(actions), torch.tensor(returns))
    return [b.to(device) for b in batch], obs


def main():
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    env = Corridor()
    net = ActorCritic(env.length, 2).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=HP["lr"])
    obs = env.reset()
    for update in range(HP["updates"]):
        (states, actions, returns), obs = collect(env, obs, net, device)
        logits, values = net(states)
        dist = Categorical(logits=logits)
        advantage = returns - values.detach()
        policy_loss = -(dist.log_prob(actions) * advantage).mean()
        value_loss = F.mse_loss(values.squeeze(-1), returns)
        loss = policy_loss + HP["value"] * value_loss - HP["entropy"] * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), HP["clip"])
        optimizer.step()
        print(f"update {update} policy {policy_loss.item():.4f} value {value_loss.item():.4f}")


if __name__ == "__main__":
    main()
