"""A plan in a few words, for tables."""

from __future__ import annotations

from simpart.plan import Plan

__all__ = ["plan_words"]


def plan_words(plan: Plan) -> str:
    """Stages with their devices, micro-batches, schedule, recomputation, what is split: `4 stages on 2 devices each,
    16 × 4 samples, 1f1b, recompute in 0–3`."""
    from simpart.describe import counted, numbers

    devices = [len(group.devices) for group in plan.groups]
    if len(plan.stages) == 1:
        where = f"1 stage on {counted(devices[0], 'device')}"
    elif len(set(devices)) == 1 and len(plan.groups) == len(plan.stages):
        where = f"{len(plan.stages)} stages on {counted(devices[0], 'device')} each"
    else:
        where = f"{len(plan.stages)} stages on {'+'.join(map(str, devices))} devices"
    parts = [where, f"{plan.batch.micro_batches} × {counted(plan.batch.micro_batch, 'sample')}", plan.schedule.kind]
    again = [s for s, stage in enumerate(plan.stages) if stage.recompute]
    if again:
        parts.append("recompute" if len(again) == len(plan.stages) else f"recompute in {numbers(again)}")
    splits: dict[str, list[int]] = {}
    for g, group in enumerate(plan.groups):
        words = " × ".join(f"{name} {size}" for name, size in group.sharding_axes if size > 1)
        splits.setdefault(words, []).append(g)
    parts.extend(
        split if len(splits) == 1 else f"{split} in {numbers(held)}" for split, held in splits.items() if split
    )
    if plan.state:
        parts.append("state divided")
    return ", ".join(parts)
