"""Shardings of a deep model: all strategies of all kernels enumerated and priced on a mesh, presets, and what flows.

`python benchmarks/sharding.py [MODEL] [--axes 8 8]` prints JSON: counts, and CPU seconds of a fresh process. The goal
for a 96-layer GPT on two axes is 2 s; torch's own sharding propagation takes about 6 ms a query.
"""

from __future__ import annotations

import argparse
import json
import time

from simpart.cost import Costs
from simpart.costmodels.alpha_beta import AlphaBeta
from simpart.costmodels.roofline import Roofline
from simpart.hardware import load_cluster
from simpart.model_spec import parse_model
from simpart.model_spec.cache import captured
from simpart.plan import DeviceGroup, Devices
from simpart.sharding import flow
from simpart.sharding.combine import Degrees, shard
from simpart.sharding.options import options

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=GPT3)
    parser.add_argument("--axes", type=int, nargs=2, default=[8, 8])
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--cluster", default="dgx-a100:8")
    chosen = parser.parse_args()
    graph = captured(parse_model(chosen.model), "bfloat16").at(chosen.micro_batch)
    cluster = load_cluster(chosen.cluster)
    outer, inner = chosen.axes
    group = DeviceGroup(devices=Devices.of(range(outer * inner)), axes=(("x", outer), ("y", inner)))
    costs = Costs(compute=Roofline(), communication=AlphaBeta())
    kernels = int(graph.flat.kernel_class.size)
    start = time.process_time()
    found = options(graph, chosen.micro_batch, group, cluster, costs)
    listed = time.process_time()
    again = options(graph, chosen.micro_batch, group, cluster, costs)
    relisted = time.process_time()
    degrees = Degrees(tp=inner, sp=True, zero=1)
    made = shard(graph, chosen.micro_batch, degrees, outer)
    sharded = time.process_time()
    axes = (("dp", outer), ("tp", inner))
    flow(graph, made.sharding, axes, chosen.micro_batch, made.state)
    cold = time.process_time()
    flowing = flow(graph, made.sharding, axes, chosen.micro_batch, made.state)
    warm = time.process_time()
    document = {
        "model": chosen.model,
        "axes": chosen.axes,
        "kernels": kernels,
        "strategies": len(again.strategies),
        "strategies_of_all_kernels": int(found.size[graph.flat.kernel_class].sum()),
        "local_signatures": found.signatures,
        "collectives": found.collectives,
        "enumerate_and_price_cpu_s": round(listed - start, 3),
        "warm_enumerate_and_price_cpu_s": round(relisted - listed, 3),
        "tensor_parallel_preset_cpu_s": round(sharded - relisted, 3),
        "flow_cpu_s": round(cold - sharded, 3),
        "warm_flow_cpu_s": round(warm - cold, 3),
        "conversions": sum(c.times for c in flowing.conversions if c.moves),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
