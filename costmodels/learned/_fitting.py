"""Few constants from many rows: robust least squares on log errors, Gaussian priors on the logs of the constants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

__all__ = ["fit_constants"]

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

_SCALE = 0.15  # log error from which a row counts linearly
_PRIOR_ROWS = 1500.0  # rows at which the priors weigh as stated
_STEP = 1e-2
_TRUST = 0.5  # largest change of a log constant in one step


def fit_constants(
    predict: Callable[[Floats], Floats],
    target: Floats,
    centre: Floats,
    spread: Floats,
    *,
    weights: Floats | None = None,
    iterations: int = 14,
) -> Floats:
    """Log constants that bring `predict(constants)` near `target`, both log seconds; Levenberg-Marquardt.

    `centre` and `spread` are mean and sd of the constants' prior, which grows with the rows: it speaks for what other
    devices may be like, which more rows of the same devices don't tell.
    """
    weight = np.ones(len(target)) if weights is None else weights / weights.mean()
    prior = len(target) / _PRIOR_ROWS / spread**2
    constants = centre.copy()

    def cost(at: Floats, error: Floats) -> float:
        loss = 2.0 * (np.sqrt(1.0 + (error / _SCALE) ** 2) - 1.0)
        return float(weight @ loss + prior @ (at - centre) ** 2)

    predicted = predict(constants)
    best, damping = cost(constants, predicted - target), 1e-2
    for _ in range(iterations):
        error = predicted - target
        slopes = np.stack([(predict(constants + d) - predicted) / _STEP for d in _STEP * np.eye(len(centre))], axis=1)
        w = weight / np.sqrt(1.0 + (error / _SCALE) ** 2) / _SCALE**2
        curvature = (slopes * w[:, None]).T @ slopes
        gradient = prior * (centre - constants) - (slopes * w[:, None]).T @ error
        for _ in range(8):
            system = curvature + np.diag(prior + damping * np.diag(curvature) + 1e-12)
            tried = constants + np.clip(np.linalg.solve(system, gradient), -_TRUST, _TRUST)
            there = predict(tried)
            value = cost(tried, there - target)
            if value < best:
                break
            damping *= 4.0
        else:
            return constants
        gained, best, constants, predicted, damping = best - value, value, tried, there, damping / 3.0
        if gained < 1e-4 * best:
            break
    return constants
