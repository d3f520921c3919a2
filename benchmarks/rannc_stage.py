"""How long the exact stage problem takes: all numbers of stages at once, for several chain lengths and device counts.

    python benchmarks/rannc_stage.py [--repeats 5]

Prints every repeat. Costs are random: times per block drawn apart, 5 % noise per stage, memory that rules out some.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from simpart.searchers._chain import ChainPlan, solve_chain
from simpart.searchers._stages import StageCosts


def random_costs(blocks: int, devices: int, *, power_of_two: bool, correlated: bool, seed: int) -> StageCosts:
    """A chain of random blocks; `correlated`: backward takes about twice forward, as in most models."""
    rng = np.random.default_rng(seed)
    replicas = tuple(r for r in range(1, devices + 1) if not power_of_two or r & (r - 1) == 0)
    samples = np.array([-(-2 * devices // r) for r in replicas], dtype=np.float64)

    def sums(values: np.ndarray) -> np.ndarray:
        ends = np.concatenate([[0.0], np.cumsum(values)])
        return (ends[None, :] - ends[:-1, None])[:, :, None]

    forward = rng.uniform(0.5, 2, blocks)
    backward = forward * rng.uniform(1.6, 2.4, blocks) if correlated else rng.uniform(0.5, 4, blocks)
    cut = np.concatenate([[0.0], rng.uniform(0, 0.1, blocks - 1), [0.0]])
    shape = (blocks, blocks + 1, len(replicas))
    noise = 1 + 0.05 * rng.random(shape)
    return StageCosts(
        replicas=replicas,
        forward_s=sums(forward) * samples * noise,
        backward_s=sums(backward) * samples * noise[::-1],
        transfer_s=(cut[:-1, None, None] + cut[None, :, None]) * samples,
        allreduce_s=np.zeros(shape),
        static_bytes=sums(rng.uniform(0, 1, blocks)) + np.zeros(shape),
        stash_bytes=sums(rng.uniform(0, 0.02, blocks)) * samples,
        limit_bytes=blocks / 3,
        micro_batches=8,
        allowed=np.ones(shape, dtype=np.bool_),
        in_flight="1f1b",
    )


def main() -> None:
    """Time every size; the answer is checked against nothing here (tests do that)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("blocks devices replicas     backward      feasible S   seconds of each repeat")
    for blocks, devices, power_of_two in ((16, 16, False), (32, 64, True), (32, 64, False), (32, 256, True)):
        for correlated in (True, False):
            costs = random_costs(blocks, devices, power_of_two=power_of_two, correlated=correlated, seed=1)
            seconds = []
            for _ in range(repeats):
                start = time.perf_counter()
                answers = solve_chain(costs, devices, blocks)
                seconds.append(time.perf_counter() - start)
            found = sum(isinstance(answer, ChainPlan) for answer in answers.values())
            kinds = f"{'powers of 2' if power_of_two else 'any':12} {'2 x forward' if correlated else 'independent':13}"
            print(f"{blocks:6} {devices:7} {kinds} {found:8}       {'  '.join(f'{x:.2f}' for x in seconds)}")


if __name__ == "__main__":
    main()
