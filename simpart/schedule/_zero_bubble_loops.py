"""The loops of zero-bubble orders, over flat arrays; as plain Python over lists they give the same answers.

Rows of groups lie one after the other, group g from `indptr[g]` to `indptr[g + 1]`. Kinds are 0 F, 1 B, 2 I, 3 W.
"""

from __future__ import annotations

from typing import Any

__all__ = ["fill", "merge"]


def merge(
    turn_ptr: Any, start_s: Any, turn_kind: Any, turn_stage: Any, interval_s: float, micro_batches: int, next_m: Any,
    kind: Any, stage: Any, micro_batch: Any,
) -> None:  # fmt: skip
    """Each group's turns of all micro-batches by (start, micro-batch, kind, stage); turn t comes at
    `start_s[t] + m * interval_s`. `next_m` is all 0 at first, the last three are filled."""
    at = 0
    for g in range(len(turn_ptr) - 1):
        a, b = turn_ptr[g], turn_ptr[g + 1]
        for _ in range((b - a) * micro_batches):
            best = -1
            best_s = 0.0
            for t in range(a, b):
                m = next_m[t]
                if m < micro_batches:
                    starts_s = start_s[t] + m * interval_s
                    first = best < 0 or starts_s < best_s
                    if not first and starts_s == best_s:
                        n = next_m[best]
                        first = m < n or (
                            m == n
                            and (
                                turn_kind[t] < turn_kind[best]
                                or (turn_kind[t] == turn_kind[best] and turn_stage[t] < turn_stage[best])
                            )
                        )
                    if first:
                        best = t
                        best_s = starts_s
            kind[at] = turn_kind[best]
            stage[at] = turn_stage[best]
            micro_batch[at] = next_m[best]
            next_m[best] += 1
            at += 1


def fill(
    indptr: Any, kind: Any, stage: Any, micro_batch: Any, micro_batches: int, split: bool, forward_s: Any,
    input_s: Any, weight_s: Any, hop_s: Any, held: Any, kept: Any, limit: Any, patience: float, forward_end: Any,
    backward_end: Any, waiting: Any, queue: Any, head: Any, tail: Any, position: Any, level: Any, work: Any,
    begin: Any, clock: Any, out_ptr: Any, out_at: Any, out_kind: Any, out_stage: Any, out_m: Any,
) -> bool:  # fmt: skip
    """Run the orders, each action as soon as it can; with `split`, put W in where a group would wait (see
    `_zero_bubble`). False: over the limit, or the orders wait for one another.

    Arrays after `patience` are working space: ends by stage × micro-batch (-1 at first), waiting groups by kind, stage
    and micro-batch (-1), queued input gradients, by group the queue's ends and place (the row's start), level (0),
    `work` (all groups), begin (-1), clock (0), place in the output (`out_ptr`).
    """
    groups = len(indptr) - 1
    stages = len(forward_s)
    last = stages - 1
    size = (stages + 1) * micro_batches
    todo = groups
    while todo:
        todo -= 1
        g = work[todo]
        now, high = clock[g], level[g]
        stopped = False
        while position[g] < indptr[g + 1]:
            at = position[g]
            k, s, m = kind[at], stage[at], micro_batch[at]
            needs = -1
            if k == 0:
                source = 0.0
                ready = 0.0
                if s:
                    source = forward_end[(s - 1) * micro_batches + m]
                    ready = source + hop_s[s - 1]
                    needs = (s - 1) * micro_batches + m
            elif k == 3:
                source = 0.0
                ready = 0.0
            elif s < last:
                source = backward_end[(s + 1) * micro_batches + m]
                ready = source + hop_s[s]
                needs = size + (s + 1) * micro_batches + m
            else:
                source = forward_end[s * micro_batches + m]
                ready = source
                needs = size + (s + 1) * micro_batches + m
            if source < 0:
                waiting[needs] = g
                stopped = True
                break
            full = k == 0 and high + held[s] > limit[g]
            if head[g] < tail[g]:
                behind = queue[head[g]]
                if full or ready - now >= patience * weight_s[stage[behind]]:
                    head[g] += 1
                    to = out_at[g]
                    out_kind[to] = 3
                    out_stage[to] = stage[behind]
                    out_m[to] = micro_batch[behind]
                    out_at[g] += 1
                    if begin[g] < 0:
                        begin[g] = now
                    now += weight_s[stage[behind]]
                    high -= kept[stage[behind]]
                    continue
            if full:
                return False
            now = max(now, ready)
            if begin[g] < 0:
                begin[g] = now
            to = out_at[g]
            out_kind[to] = k
            out_stage[to] = s
            out_m[to] = m
            out_at[g] += 1
            answers = -1
            if k == 0:
                now += forward_s[s]
                high += held[s]
                forward_end[s * micro_batches + m] = now
                answers = s * micro_batches + m
            elif k == 3:
                now += weight_s[s]
                high -= kept[s]
            else:
                if k == 1:
                    now += input_s[s] + weight_s[s]
                    high -= held[s]
                else:
                    now += input_s[s]
                    high -= held[s] - kept[s]
                backward_end[s * micro_batches + m] = now
                answers = size + s * micro_batches + m
                if split and k == 2:
                    queue[tail[g]] = at
                    tail[g] += 1
            position[g] += 1
            if answers >= 0 and waiting[answers] >= 0:
                work[todo] = waiting[answers]
                waiting[answers] = -1
                todo += 1
        if not stopped:
            while head[g] < tail[g]:
                behind = queue[head[g]]
                head[g] += 1
                to = out_at[g]
                out_kind[to] = 3
                out_stage[to] = stage[behind]
                out_m[to] = micro_batch[behind]
                out_at[g] += 1
                now += weight_s[stage[behind]]
        clock[g] = now
        level[g] = high
    for g in range(groups):  # noqa: SIM110 - also runs as machine code
        if position[g] < indptr[g + 1]:
            return False
    return True
