"""Loss curves with known answers, simulated in NumPy: the oracles that stability verdicts are held against."""

from __future__ import annotations

import numpy as np

EDGE = {
    "sgd": lambda b: 2.0,
    "momentum": lambda b: 2 + 2 * b,
    "nesterov": lambda b: (2 + 2 * b) / (1 + 2 * b),
    "adam": lambda b: (2 + 2 * b) / (1 - b),
}
"""Largest stable lr * curvature of each rule on a quadratic (Cohen et al. 2021, 2022; Adam with a frozen P)."""


def spectrum(dim=50, condition=100.0):
    return np.geomspace(1.0 / condition, 1.0, dim)


def advance(rule, state, theta, gradient, lr, memory, step):
    """One update; `state` is the buffer. For "adam" the preconditioner is frozen at 1 and the bias is corrected."""
    if rule == "sgd":
        return theta - lr * gradient, state
    if rule == "adam":
        state = memory * state + (1 - memory) * gradient
        return theta - lr * state / (1 - memory ** (step + 1)), state
    state = memory * state + gradient
    return theta - lr * (gradient + memory * state if rule == "nesterov" else state), state


def quadratic(rule, lr, total, *, memory=0.9, seed=0, noise=0.0, curvature=None, start=1.0, double_at=None):
    """Losses of 1/2 sum lambda theta^2, row k before update k; ends with its first non-finite row."""
    rng = np.random.default_rng(seed)
    lam = spectrum() if curvature is None else np.asarray(curvature, dtype=float)
    theta = start * rng.standard_normal(lam.size)
    state, losses = np.zeros_like(theta), []
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(total):
            if double_at is not None and step == double_at:
                lam = 2 * lam
            losses.append(0.5 * float(np.sum(lam * theta**2)))
            if not np.isfinite(losses[-1]):
                break
            gradient = lam * theta + noise * rng.standard_normal(lam.size)
            theta, state = advance(rule, state, theta, gradient, lr, memory, step)
    return np.array(losses)


def catapult(a, total=300, *, width=200, seed=0):
    """Losses of f = u.v / sqrt(n) trained towards 0 by full-batch SGD, with lr * initial curvature = a."""
    rng = np.random.default_rng(seed)
    u, v = rng.standard_normal((2, width))
    lr = a * width / (u @ u + v @ v)
    losses = []
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(total):
            f = u @ v / np.sqrt(width)
            losses.append(0.5 * f * f)
            if not np.isfinite(losses[-1]):
                break
            u, v = u - lr * f * v / np.sqrt(width), v - lr * f * u / np.sqrt(width)
    return np.array(losses)


def least_squares(lr, total, *, batch=16, seed=0, dim=1, start=3.0):
    """Minibatch least squares without label noise: losses and their standard errors, each of shape (steps,)."""
    rng = np.random.default_rng(seed)
    theta, losses, errors = np.full(dim, start / np.sqrt(dim)), [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(total):
            x = rng.standard_normal((batch, dim))
            residual = x @ theta
            each = 0.5 * residual**2
            losses.append(each.mean())
            errors.append(each.std(ddof=1) / np.sqrt(batch) if batch > 1 else np.nan)
            if not np.isfinite(losses[-1]):
                break
            theta = theta - lr * x.T @ residual / batch
    return np.array(losses), np.array(errors)


def tanh_net(lr, total, *, points=60, width=30, seed=0):
    """Full-batch losses of a small tanh network on a one-dimensional regression: sharpens up to 2 / lr."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-1, 1, points)[:, None]
    y = np.sin(4 * x)
    w1, b1 = rng.standard_normal((1, width)), rng.standard_normal(width)
    w2, b2 = 0.1 * rng.standard_normal((width, 1)) / np.sqrt(width), np.zeros(1)
    losses = []
    for _ in range(total):
        h = np.tanh(x @ w1 + b1)
        r = h @ w2 + b2 - y
        losses.append(0.5 * float(np.mean(r**2)))
        dz = (r @ w2.T) * (1 - h**2) / points
        w2, b2 = w2 - lr * h.T @ r / points, b2 - lr * r.mean(0)
        w1, b1 = w1 - lr * x.T @ dz, b1 - lr * dz.sum(0)
    return np.array(losses)


def noisy_decay(total=1000, *, seed=0, start=2.3, floor=0.4, rate=6.0, sd=0.15):
    """A healthy minibatch curve: exponential decay to a floor with noise of known size."""
    rng = np.random.default_rng(seed)
    t = np.arange(total) / total
    return floor + (start - floor) * np.exp(-rate * t) + sd * rng.standard_normal(total), np.full(total, sd)
