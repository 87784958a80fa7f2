"""Print the code report of a kernel that has all that the kernels must not have, one target a line.

A script of its own, since compiling and interpreting exclude each other within one process.
"""

import json

import triton
import triton.language as tl

from bench.machine_code import reports
from bench.variants import TARGETS


@triton.jit
def bad(data, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(data + 3 * offs)
    y = tl.load(data + 5 * offs)
    # BLOCK²/128 values a thread, all of them needed after their largest is known
    products = x[:, None] * y[None, :]
    largest = tl.max(tl.max(products, axis=0), axis=0)
    totals = tl.sum(tl.exp(products - largest), axis=0)
    tl.store(data + 3 * offs, totals * (count // tl.load(data).to(tl.int64)).to(tl.float32))


for name in ("sm_90", "gfx942"):
    [found] = reports([(bad, {"BLOCK": 128}, {"data": "*fp32", "count": "i64"})], TARGETS[name])
    print(json.dumps({"target": name, **found}))
