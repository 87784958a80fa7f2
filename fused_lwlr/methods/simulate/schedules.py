"""Learning-rate schedules, as arrays with a rate for each step."""

import numpy as np

from fused_lwlr.methods.checks import Array, check_count, check_rate, number, require


def warmup(lr: float, steps: int, warmup_steps: int) -> Array:
    """Returns a linear rise to a constant rate: lr · (k + 1) / (warmup_steps + 1) at step k, then lr; float64 [steps].

    The same as `torch.optim.lr_scheduler.LinearLR` with a start factor of 1 / (warmup_steps + 1).

    Args:
        lr: the rate after the warm-up.
        steps: the number of all steps.
        warmup_steps: the number of warm-up steps.

    Raises:
        ValueError: an argument is negative, or the warm-up is longer than the training.
    """
    _check(lr, steps, warmup_steps)
    return lr * np.minimum((np.arange(steps) + 1) / (warmup_steps + 1), 1.0)


def cosine(lr: float, steps: int, warmup_steps: int = 0) -> Array:
    """Returns half a cosine from lr towards 0, float64 [steps], after an optional warm-up.

    The same as `CosineAnnealingLR` with T_max = steps.

    Args:
        lr: the highest rate.
        steps, warmup_steps: as in `warmup`. The cosine takes the steps after the warm-up.

    Raises:
        ValueError: as in `warmup`.
    """
    rates = warmup(lr, steps, warmup_steps)
    rest = steps - warmup_steps
    rates[warmup_steps:] = lr * (1 + np.cos(np.pi * np.arange(rest) / max(rest, 1))) / 2
    return rates


def one_cycle(
    lr: float, steps: int, pct_start: float = 0.1, div_factor: float = 10.0, final_div_factor: float = 1000.0
) -> Array:
    """Returns half a cosine from lr / div_factor up to lr, then one down to lr / div_factor / final_div_factor.

    The same as `OneCycleLR` with cosine annealing, float64 [steps]. The defaults are from Spreads in Effective Learning
    Rates, Figure 17.

    Args:
        lr: the highest rate.
        steps: the number of all steps.
        pct_start: the fraction of the steps in which the rate rises, from 0 to 1.
        div_factor: the highest rate divided by the first rate.
        final_div_factor: the first rate divided by the last rate.

    Raises:
        ValueError: lr or steps is negative, pct_start is not in [0, 1], or a factor is not above 0.
    """
    _check(lr, steps, 0)
    pct_start = number("pct_start", pct_start, "a fraction of the steps, 0 to 1", lambda found: 0 <= found <= 1)
    for name, value in (("div_factor", div_factor), ("final_div_factor", final_div_factor)):
        number(name, value, "above 0", lambda found: found > 0)
    start, end = lr / div_factor, lr / div_factor / final_div_factor
    k, peak, last = np.arange(steps), pct_start * steps - 1, steps - 1
    up = np.clip(k / peak if peak > 0 else np.ones(steps), 0, 1)
    down = np.clip((k - peak) / (last - peak) if last > peak else np.zeros(steps), 0, 1)
    return np.where(k <= peak, _between(start, lr, up), _between(lr, end, down))


def _between(begin: float, end: float, part: Array) -> Array:
    return end + (begin - end) * (1 + np.cos(np.pi * part)) / 2


def _check(lr: float, steps: int, warmup_steps: int) -> None:
    check_rate(lr)
    check_count("steps", steps, 0)
    check_count("warmup_steps", warmup_steps, 0)
    require(warmup_steps <= steps, "warmup_steps", warmup_steps, f"at most steps={steps}")
