"""Print the code report of a kernel that breaks every rule for the kernels' machine code, one target a line; the last
line with fewer registers than the kernel has live values.

A separate script, since an interpreted kernel cannot be compiled.
"""

import json

import triton
import triton.language as tl

from bench.machine_code import Job, reports
from bench.variants import TARGETS


@triton.jit
def bad(data, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(data + 3 * offs)
    y = tl.load(data + 5 * offs)
    # BLOCK²/128 values a thread, all of them needed after the largest is known
    products = x[:, None] * y[None, :]
    largest = tl.max(tl.max(products, axis=0), axis=0)
    totals = tl.sum(tl.exp(products - largest), axis=0)
    tl.store(data + 3 * offs, totals * (count // tl.load(data).to(tl.int64)).to(tl.float32))


for name, registers in (("sm_90", None), ("gfx942", None), ("sm_90", 64)):
    [found] = reports([Job(bad, {"BLOCK": 128}, {"data": "*fp32", "count": "i64"}, registers)], TARGETS[name])
    print(json.dumps({"target": name, **found}))
