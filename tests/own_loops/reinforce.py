"""A policy gradient: rollouts without gradient, several updates on each."""

import torch
from torch import nn
from torch.distributions import Categorical


def train(watch, seed=0):
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    value = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], lr=3e-3)
    history = []
    with watch([policy, value], optimizer, minimised=False):
        for iteration in range(15):
            states, actions, rewards, olds = [], [], [], []
            state = torch.randn(4)
            with torch.no_grad():
                for t in range(20):
                    chosen = Categorical(logits=policy(state))
                    action = chosen.sample()
                    states.append(state)
                    actions.append(action)
                    olds.append(chosen.log_prob(action))
                    rewards.append(float((state[0] > 0) == bool(action)))
                    state = torch.randn(4)
            s, a, old, r = torch.stack(states), torch.stack(actions), torch.stack(olds), torch.tensor(rewards)
            for epoch in range(4):
                ratio = (Categorical(logits=policy(s)).log_prob(a) - old).exp()
                values = value(s).squeeze(-1)
                advantage = (r - values).detach()
                policy_loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                loss = policy_loss + 0.5 * nn.functional.mse_loss(values, r)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
                optimizer.step()
                history.append(loss.item())
    return history
