"""All strategies of all kernels of a deep model on a mesh, enumerated, localised and priced.

`python benchmarks/strategies.py [MODEL] [--axes 8 8]` prints JSON: counts and seconds of a fresh process, and for
comparison torch's own cost of one sharding propagation, about 6 ms a query.
"""

from __future__ import annotations

import argparse
import json
import time

from simpart.capture import capture
from simpart.cost import Signature, SignatureTable, TensorForm
from simpart.costmodels.roofline import Roofline
from simpart.hardware_files import load_device
from simpart.model_spec import parse_model
from simpart.signatures import signatures_of
from simpart.tdl import Call, call_like, local_call, mesh_strategies

GPT3 = "gpt:layers=96,hidden=12288,heads=96,seq=2048,vocab=51200"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=GPT3)
    parser.add_argument("--axes", type=int, nargs="+", default=[8, 8])
    parser.add_argument("--micro-batch", type=int, default=8)
    options = parser.parse_args()
    graph = capture(parse_model(options.model), model=options.model).at(options.micro_batch)
    start = time.perf_counter()
    signatures = signatures_of(graph, options.micro_batch)
    calls = dict.fromkeys(call_like(signature) for signature in signatures)
    dtypes = {call_like(s): tuple(form.dtype for form in s.outputs) for s in signatures}
    local: dict[Signature, None] = {}
    strategies = 0
    for call in calls:
        for splits in mesh_strategies(call, tuple(options.axes)):
            strategies += 1
            part = call
            for split, members in zip(splits, options.axes, strict=True):
                part = local_call(part, split, members)
            local.setdefault(signature_of(part, dtypes[call]))
    enumerated = time.perf_counter()
    Roofline().estimate(SignatureTable(tuple(local)), load_device("h100-sxm-80gb"))
    priced = time.perf_counter()
    kernels = int(graph.flat.kernel_class.size)
    found = {
        "model": options.model,
        "axes": options.axes,
        "kernels": kernels,
        "distinct_kernels": len(calls),
        "strategies": strategies,
        "local_signatures": len(local),
        "enumerate_s": round(enumerated - start, 3),
        "price_s": round(priced - enumerated, 3),
    }
    print(json.dumps(found))


def signature_of(call: Call, dtypes: tuple[str, ...]) -> Signature:
    """A local call as cost models see it, dense."""
    inputs = tuple(TensorForm(shape, dtype) for shape, dtype in zip(call.inputs, call.dtypes, strict=True))
    outputs = tuple(TensorForm(shape, dtype) for shape, dtype in zip(call.outputs, dtypes, strict=True))
    return Signature(call.target, inputs, outputs, call.arguments)


if __name__ == "__main__":
    main()
