"""A small net on what an analytic core leaves: the smooth counterpart of the trees, for devices nobody measured.

It sees the work alone, no data sheet: with a handful of devices their numbers tell it apart which device a row is from,
and nothing of another one. Inputs are standardised and clipped, the output is bounded, so that it cannot run away.
Trained with torch, evaluated with numpy. Reference for the training: Loshchilov & Hutter, "Decoupled weight decay
regularization" (2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["NET_PARTS", "Net", "fit_net"]

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

NET_PARTS = ("middle", "scale", "first", "first_bias", "second", "second_bias", "last", "last_bias")
_WIDTH = 48
_CLIP = 3.0  # standard deviations that an input counts at most
_BOUND = 1.5  # largest output, in logs: a factor of 4.5
_SMOOTHING = 0.05  # log error below which it counts squared
_BATCH, _EPOCHS, _LEAST_STEPS = 512, 10, 250  # four times as many fit better and tell new devices worse
_RATE, _DECAY = 5e-3, 3e-2
_CHUNK = 4096  # rows evaluated at once, so that layers stay in the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """Two hidden layers: `bound · tanh(last · relu(second · relu(first · x)) / bound)`, x the first columns, less
    `middle` and over `scale`. Raises ValueError when the arrays don't fit one another or hold no numbers."""

    middle: Vector
    scale: Vector
    first: Matrix
    first_bias: Vector
    second: Matrix
    second_bias: Vector
    last: Matrix
    last_bias: Vector

    def __post_init__(self) -> None:
        inputs, (one, two) = len(self.middle), (len(self.first_bias), len(self.second_bias))
        wanted = ((inputs,), (inputs,), (one, inputs), (one,), (two, one), (two,), (1, two), (1,))
        for part, shape in zip(NET_PARTS, wanted, strict=True):
            values = getattr(self, part)
            if values.shape != shape or values.dtype != np.float32 or not np.isfinite(values).all():
                raise ValueError(f"a net's {part} must be {shape} finite float32, got {values.shape} {values.dtype}")

    def predict(self, columns: Matrix) -> Floats:
        """What it adds to each row, in logs; `columns[f]` is feature f of all rows, features of the device last."""
        found = np.empty(columns.shape[1], dtype=np.float64)
        for start in range(0, len(found), _CHUNK):
            hidden = standardised(columns[: len(self.middle), start : start + _CHUNK], self.middle, self.scale)
            for weights, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
                hidden = weights @ hidden
                hidden += bias[:, None]
                np.maximum(hidden, 0.0, out=hidden)
            found[start : start + _CHUNK] = (self.last @ hidden + self.last_bias)[0]
        return _BOUND * np.tanh(found / _BOUND)


def standardised(columns: Matrix, middle: Vector, scale: Vector) -> Matrix:
    """Columns of mean zero and sd one over the rows trained on, clipped."""
    found: Matrix = (columns - middle[:, None]) / scale[:, None]
    return np.clip(found, -_CLIP, _CLIP, out=found)


def fit_net(columns: Matrix, target: Floats, weights: Floats, *, seed: int = 0, epochs: int | None = None) -> Net:
    """A net for `target`, in its units, from the rows of `columns`. One thread, same seed, same net; torch's global
    random state is left alone."""
    import torch

    rng = np.random.default_rng(seed)
    middle = columns.mean(axis=1, dtype=np.float64).astype(np.float32)
    scale = (columns.std(axis=1, dtype=np.float64) + 1e-6).astype(np.float32)
    shapes = ((_WIDTH, len(columns)), (_WIDTH, _WIDTH), (1, _WIDTH))
    start = [rng.normal(0.0, np.sqrt(gain / inputs), (outputs, inputs)).astype(np.float32)
             for (outputs, inputs), gain in zip(shapes, (2.0, 2.0, 0.1), strict=True)]  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layers = [torch.tensor(w, requires_grad=True) for w in start]
        biases = [torch.zeros(len(w), requires_grad=True) for w in start]
        x = torch.from_numpy(np.ascontiguousarray(standardised(columns, middle, scale).T))
        y = torch.from_numpy(target.astype(np.float32))
        w = torch.from_numpy((weights / weights.mean()).astype(np.float32))
        optimizer = torch.optim.AdamW(
            [{"params": layers, "weight_decay": _DECAY}, {"params": biases, "weight_decay": 0.0}], lr=_RATE, fused=True
        )
        batches = range(0, len(target), _BATCH)
        epochs = epochs or max(_EPOCHS, -(-_LEAST_STEPS // len(batches)))
        pace = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=epochs * len(batches))
        for _ in range(epochs):
            order = torch.from_numpy(rng.permutation(len(target)))
            for at in batches:
                rows = order[at : at + _BATCH]
                error = _output(layers, biases, x[rows]) - y[rows]
                loss = (torch.sqrt(error * error + _SMOOTHING**2) * w[rows]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                pace.step()
    finally:
        torch.set_num_threads(threads)
    values = [value.detach().numpy().copy() for pair in zip(layers, biases, strict=True) for value in pair]
    return Net(**dict(zip(NET_PARTS, (middle, scale, *values), strict=True)))


def _output(layers: list[Any], biases: list[Any], inputs: Any) -> Any:
    """The net in torch, of standardised rows."""
    import torch

    hidden = inputs
    for weights, bias in zip(layers[:-1], biases[:-1], strict=True):
        hidden = torch.relu(torch.nn.functional.linear(hidden, weights, bias))
    return _BOUND * torch.tanh(torch.nn.functional.linear(hidden, layers[-1], biases[-1])[:, 0] / _BOUND)
