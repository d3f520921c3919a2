"""Checks of cost arrays: no holes, nothing negative; infinity means that something cannot be."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simpart.errors import UserError

__all__ = ["costs_array"]


def costs_array(name: str, values: npt.ArrayLike, *, finite: bool = False) -> npt.NDArray[np.float64]:
    """`values` as numbers >= 0; raises UserError naming the first entry that is not.

    >>> costs_array("time", [1, 2]).tolist()
    [1.0, 2.0]
    """
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name} must be numbers, got {type(values).__name__}; give one number >= 0 per entry"
        ) from error
    bad = ~(array >= 0) | (np.isinf(array) if finite else False)
    if bad.any():
        at = tuple(int(x) for x in np.argwhere(bad)[0])
        kind = "finite numbers" if finite else "numbers"
        raise UserError(f"{name} must be {kind} >= 0, got {array[at]} at {list(at)}; mend the costs")
    return array
