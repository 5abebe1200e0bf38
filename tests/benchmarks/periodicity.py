"""How often `find_period` fires on clean curves, and how often it finds a planted period and names it, with intervals.

    python tests/benchmarks/periodicity.py [--clean 2000] [--planted 1000]

Clean curves are autocorrelated up to random walks, decaying, stepping down, noisier at first, with outliers or with two
digits. A planted pattern has a size relative to the noise within one period, which is what it has to be seen against. The last
table looks at one run through evaluations at fixed steps and at fixed times (P2.10).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import binomtest

from workbench.topics.periodicity.period import Period, find_period

Floats = NDArray[np.float64]
Curve = Callable[[int, np.random.Generator], Floats]
ALPHA = 0.01
SHAPES = ("sine", "sawtooth", "pulse", "ten classes")
EPOCHS = (8, 40)
"""Planted patterns repeat this often at least and at most."""


def autoregressive(memory: float) -> Curve:
    """Return curves of noise with this correlation from one value to the next."""

    def curve(points: int, rng: np.random.Generator) -> Floats:
        return np.asarray(lfilter([1.0], [1.0, -memory], rng.standard_normal(points + 400))[400:])

    return curve


def _decay(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    fall = rng.uniform(0.1, 0.5) + 2 * np.exp(-rng.uniform(2, 12) * t)
    return np.asarray(fall * np.exp(rng.uniform(0.01, 0.1) * autoregressive(rng.uniform(0, 0.9))(points, rng)))


def _power_law(points: int, rng: np.random.Generator) -> Floats:
    fall = 2.3 * (1 + np.arange(points) / rng.uniform(1, 30)) ** -rng.uniform(0.3, 1)
    return np.asarray(fall * np.exp(0.05 * autoregressive(0.6)(points, rng)))


def _plateaus(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    curve = 2.3 * np.exp(-2 * t)
    for at in np.sort(rng.uniform(0.1, 0.95, 3)):
        curve = np.where(t > at, 0.6 * curve, curve)
    return np.asarray(curve * np.exp(0.05 * autoregressive(0.6)(points, rng)))


def _overfitting(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    return np.asarray(np.exp(-8 * t) + 0.8 * t**1.5 + 0.2 + 0.03 * autoregressive(0.9)(points, rng))


def _settling_noise(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    return np.asarray(0.3 + np.exp(-4 * t) * (1 + 0.3 * rng.standard_normal(points)))


def _outliers(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    rare = (rng.random(points) < 0.02) * rng.exponential(2, points)
    return np.asarray(np.exp(-3 * t) + 0.05 * rng.standard_normal(points) ** 2 + rare)


def _two_digits(points: int, rng: np.random.Generator) -> Floats:
    t = np.arange(points) / points
    noise = np.abs(autoregressive(0.5)(points, rng))
    return np.asarray(np.clip(1 - 0.9 * np.exp(-6 * t) - 0.02 * noise, 0, 1).round(2))


def _smooth(points: int, rng: np.random.Generator) -> Floats:
    return np.asarray(0.4 + 1.9 * np.exp(-rng.uniform(2, 20) * np.arange(points) / points))


CLEAN: dict[str, Curve] = {
    "white noise": autoregressive(0.0),
    **{f"AR(1) {memory:g}": autoregressive(memory) for memory in (0.3, 0.6, 0.9, 0.97)},
    "random walk": lambda points, rng: np.cumsum(rng.standard_normal(points)),
    "noisy decay": _decay,
    "power law": _power_law,
    "plateaus": _plateaus,
    "overfitting": _overfitting,
    "noise that settles": _settling_noise,
    "outliers": _outliers,
    "accuracy in two digits": _two_digits,
    "decay without noise": _smooth,
}
UNDER = ("white noise", "AR(1) 0.6", "AR(1) 0.9", "random walk", "noisy decay")
"""Clean curves that patterns are planted on."""


def pattern(shape: str, phase: Floats, rng: np.random.Generator) -> Floats:
    """Return a pattern of mean 0 and deviation 1 at these phases, in epochs."""
    within = phase % 1.0
    shapes = {
        "sine": np.sin(2 * np.pi * within),
        "sawtooth": within,
        "pulse": np.exp(-6 * within),
        "ten classes": rng.standard_normal(10)[np.minimum((10 * within).astype(int), 9)],
    }
    found = shapes[shape]
    return np.asarray((found - found.mean()) / found.std())


def planted(kind: str, shape: str, size: float, rng: np.random.Generator) -> tuple[Floats, float]:
    """Return a curve with a pattern of `size` deviations of the noise within one period, and its period in samples."""
    points = int(rng.choice([100, 200, 400]))
    period = points / rng.uniform(EPOCHS[0], min(EPOCHS[1], points / 4))
    clean = CLEAN[kind](points, rng)
    width = max(4, round(period))
    pieces = clean[: points // width * width].reshape(-1, width)
    at = np.arange(width) - (width - 1) / 2
    rest = pieces - pieces.mean(1, keepdims=True)
    rest = rest - (rest @ at / (at @ at))[:, None] * at
    noise = np.sqrt((rest**2).mean(1, keepdims=True)).repeat(width, axis=1).ravel()  # it may shrink along the run
    noise = np.append(noise, np.full(points - len(noise), noise[-1]))
    return clean + size * noise * pattern(shape, np.arange(points) / period + rng.random(), rng), period


def clean_alarms(count: int, *, seed: int = 0) -> dict[str, list[bool]]:
    """Return for each kind of clean curve whether each of `count` (of all kinds together) fired, at an epoch drawn at random."""
    rng = np.random.default_rng(seed)
    fired: dict[str, list[bool]] = {kind: [] for kind in CLEAN}
    for number in range(count):
        kind = list(CLEAN)[number % len(CLEAN)]
        points = int(rng.choice([64, 100, 200, 400, 1000]))
        curve, spacing = CLEAN[kind](points, rng), float(rng.choice([1, 3, 10]))
        found = find_period(
            spacing * np.arange(points), curve, epoch=spacing * rng.uniform(1.3, points / 6), alpha=ALPHA
        )
        fired[kind].append(found.period is not None)
    return fired


def planted_found(count: int, size: float, *, seed: int = 1, known: bool = True) -> dict[str, list[tuple[bool, bool]]]:
    """Return for each shape whether each planted pattern was found, and its period named to 5 %."""
    rng = np.random.default_rng(seed)
    hits: dict[str, list[tuple[bool, bool]]] = {shape: [] for shape in SHAPES}
    for number in range(count):
        shape, kind = SHAPES[number % len(SHAPES)], UNDER[number // len(SHAPES) % len(UNDER)]
        curve, period = planted(kind, shape, size, rng)
        found = find_period(3.0 * np.arange(len(curve)), curve, epoch=3 * period if known else None, alpha=ALPHA)
        hits[shape].append(_named(found, 3 * period))
    return hits


def by_steps_or_time(count: int, size: float, pause: float, *, seed: int = 2) -> dict[str, list[bool]]:
    """Return whether the pattern of the same runs was found by evaluations at fixed steps, and at fixed times.

    A step takes 1 on average, log-normal; in every tenth of the run the machine stands still for `pause` tenths of a tenth.
    "time, by step" knows the step of each evaluation, "time, by number" sees the curve as it is plotted against time.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, list[bool]] = {"steps": [], "time, by step": [], "time, by number": []}
    for number in range(count):
        epoch, every, points = float(rng.integers(19, 40)), 4, 150
        total = every * points
        noise = autoregressive(0.6)(total + 1, rng)
        shape = pattern(SHAPES[number % len(SHAPES)], np.arange(total + 1) / epoch, rng)
        metric = noise / noise.std() + size * shape
        took = rng.lognormal(0, 0.5, total) * np.repeat(rng.lognormal(0, 0.3, total // 50 + 1), 50)[:total]
        took[rng.choice(total, 10, replace=False)] += pause * total / 100
        clock = np.append(0.0, np.cumsum(took))
        at = np.unique(np.searchsorted(clock, np.linspace(0, clock[-1], points + 1)).clip(0, total))
        seen = {
            "steps": (np.arange(0, total + 1, every), epoch),
            "time, by step": (at, epoch),
            "time, by number": (at, epoch),
        }
        for way, (steps, known) in seen.items():
            x = steps if way != "time, by number" else np.arange(len(steps)) * (total / len(steps))
            got = find_period(np.asarray(x, dtype=np.float64), metric[steps], epoch=known, alpha=ALPHA)
            found[way].append(_named(got, epoch)[1])
    return found


def _named(found: Period, period: float) -> tuple[bool, bool]:
    return found.period is not None, found.period is not None and abs(found.period / period - 1) < 0.05


def share(hits: list[bool]) -> str:
    """Return a share with its exact 95 % interval (Clopper and Pearson)."""
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(0.95)
    return f"{sum(hits) / len(hits):7.2%} ({low:.2%} to {high:.2%}) of {len(hits)}"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clean", type=int, default=2100)
    parser.add_argument("--planted", type=int, default=1000)
    asked = parser.parse_args()
    fired = clean_alarms(asked.clean)
    print(f"false alarms, {ALPHA:.0%} allowed: {share([hit for hits in fired.values() for hit in hits])}")
    for kind, hits in fired.items():
        print(f"  {kind:24} {share(hits)}")
    for size in (0.5, 1.0, 2.0, 3.0):
        for known in (True, False):
            hits_of = planted_found(asked.planted if size == 2 else asked.planted // 2, size, known=known)
            every = [pair for pairs in hits_of.values() for pair in pairs]
            print(f"planted, {size:g} times the noise within a period, epoch {'known' if known else 'unknown'}:")
            print(f"  found {share([a for a, _ in every])}; named to 5 % {share([b for _, b in every])}")
            print("  " + "; ".join(f"{shape} {sum(a for a, _ in p) / len(p):.0%}" for shape, p in hits_of.items()))
    for pause in (0.0, 3.0):
        for size in (0.5, 1.0, 2.0):
            print(f"the same runs, {size:g} times the noise, pauses of {pause:g} hundredths of the run:")
            for way, named in by_steps_or_time(200, size, pause).items():
                print(f"  {way:16} {share(named)}")


if __name__ == "__main__":
    main()
