"""A fitted communication model as one JSON document; reading never executes code, nor imports torch or pandas."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from simpart.costmodels.learned_comm._interconnects import FABRICS
from simpart.costmodels.learned_comm._model import PRIOR_SPREADS, REGIMES, Curve, Fitted, System
from simpart.costmodels.learned_comm._protocol import PRIORS
from simpart.errors import FormatError
from simpart.files import dump_json, read_document, write_document

__all__ = ["SHIPPED", "load", "save", "shipped"]

KIND, VERSION = "simpart-communication-model", 1
SHIPPED = Path(__file__).parent.parent / "artifacts" / "communication.json"


def save(path: Path | str, model: Fitted) -> None:
    """Write a model; the same model, the same bytes."""
    content = {
        "constants": {g: {n: float(f"{v:.6g}") for n, v in values.items()} for g, values in model.constants.items()},
        "domain": {group: list(limits) for group, limits in model.domain.items()},
        "spreads": {status: {r: list(pair) for r, pair in spread.items()} for status, spread in model.spreads.items()},
        "systems": [_plain(system) for system in model.systems.values()],
        "facts": dict(model.facts),
    }
    write_document(path, KIND, VERSION, {"digest": _digest(content), **content})


def load(path: Path | str = SHIPPED) -> Fitted:
    """Raises FormatError in one line when the file is missing, corrupt, of another kind or newer."""
    content = read_document(path, KIND, VERSION)
    try:
        body = {key: content[key] for key in ("constants", "domain", "spreads", "systems", "facts")}
        if content["digest"] != _digest(body):
            raise FormatError(f"{path} is corrupt: its content is not what it was written with; run simpart fit")
        for group, priors in PRIORS.items():
            if set(body["constants"][group]) != set(priors):
                raise ValueError(f"group {group} has other constants")
        return Fitted(
            constants={g: {n: float(v) for n, v in values.items()} for g, values in body["constants"].items()},
            domain={g: (float(a), float(b), float(c), float(d)) for g, (a, b, c, d) in body["domain"].items()},
            spreads={s: {r: _pair(body["spreads"][s][r]) for r in REGIMES} for s in PRIOR_SPREADS},
            systems={item["name"]: _system(item) for item in body["systems"]},
            facts=body["facts"],
        )
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} is not a fitted communication model ({error!r}); run simpart fit") from error


@lru_cache(maxsize=1)
def shipped() -> Fitted:
    """The model that comes with simpart, read once."""
    return load(SHIPPED)


def _plain(system: System) -> dict[str, Any]:
    return {
        "name": system.name, "device": system.device, "fabric": FABRICS[system.fabric], "rows": system.rows,
        "floor": float(f"{system.floor:.6g}"), "between": float(f"{system.between:.6g}"),
        "constants": {g: {n: float(f"{v:.6g}") for n, v in values.items()} for g, values in system.constants.items()},
        "curves": {
            group: {str(local): [list(curve.log2_bytes), list(curve.residual)] for local, curve in found.items()}
            for group, found in system.curves.items()
        },
    }  # fmt: skip


def _system(item: dict[str, Any]) -> System:
    return System(
        name=str(item["name"]), device=str(item["device"]), fabric=FABRICS.index(item["fabric"]),
        rows=int(item["rows"]), floor=float(item["floor"]), between=float(item["between"]),
        constants={g: {n: float(v) for n, v in values.items()} for g, values in item["constants"].items()},
        curves={
            group: {int(n): Curve(tuple(map(float, at)), tuple(map(float, left))) for n, (at, left) in found.items()}
            for group, found in item["curves"].items()
        },
    )  # fmt: skip


def _pair(values: Any) -> tuple[float, float]:
    shared, own = values
    return float(shared), float(own)


def _digest(content: Any) -> str:
    return sha256(dump_json(json.loads(json.dumps(content))).encode()).hexdigest()[:32]
