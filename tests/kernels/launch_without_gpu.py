"""Run the host functions up to the launch: kernels are compiled, loaded and called for a GPU that is not present.

This is a separate script, since it replaces the driver by one without a GPU, which Triton's launcher calls: see
stub_driver.py. Prints one line for each launch: kernel, programs, warps, whether multiplication and addition are
contracted, registers at most.
"""

import importlib

import stub_driver
import torch
from triton.runtime import driver

from fused_lwlr import LAMB, LARC, Hyperball
from fused_lwlr.kernels import ADAMW, SGD, Factors, Gate, Hyper, Row, Table, totals_of

driver.set_active(stub_driver.Driver())
launch, step, statistics = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{n}") for n in ("launch", "step", "statistics")
)
# CPU tensors replace GPU tensors
launch.is_native = lambda device: False

some, none = [torch.ones(3000), torch.ones(5)], [None, None]
both = {"param": some, "grad": some}
own = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
momentum = Hyper(lr=0.1, hyperparameters=SGD.hyperparameters(own))
plain = Hyper(lr=0.1, hyperparameters=SGD.hyperparameters({**own, "momentum": 0.0}))
step.step(SGD, Table({**both, "momentum_buffer": none}), [plain])
step.step(SGD, Table({**both, "momentum_buffer": [some[0], None]}), [momentum])
moments = {"exp_avg": some, "exp_avg_sq": some}
options = Hyper(lr=0.1, weight_decay=0.1, hyperparameters=ADAMW.hyperparameters({"betas": (0.9, 0.999), "eps": 1e-8}))
step.step(ADAMW, Table({**both, **moments, "max_exp_avg_sq": none}), [options])
step.step(ADAMW, Table({**both, **moments, "max_exp_avg_sq": [some[0], None]}), [options])
statistics.statistics(Table(both))

step.step(SGD, Table({**both, "momentum_buffer": some}), [momentum], LAMB().factor_formula(SGD))
step.step(ADAMW, Table({**both, **moments}), [options], LAMB().factor_formula(ADAMW))
steps = {"step": [torch.zeros(()), torch.zeros(())]}
rows = [Row(0, scaled=True, exponent=1, counts_for_max_norm=True), Row(1, scaled=True)]
table = Table({**both, **moments, **steps}, rows)
one = torch.ones(())
totals = totals_of([statistics.statistics(table, grad_scale=one)], [torch.tensor([True, False])])
gate = Gate(totals, 1.0, skip=True, grad_scale=one, found_inf=one)
step.step(ADAMW, table, [options], LARC().factor_formula(ADAMW), gate)
measured = step.step(ADAMW, table, [options], LARC().factor_formula(ADAMW), gate, write=False)
half = [t.bfloat16() for t in some]
halves = Table({"param": half, "grad": half, "master_weight": some, "ema": some, **moments, **steps}, rows)
factors = Factors(measured[:, 4], "gradient")
step.step(ADAMW, halves, [options._replace(lr=one)], factors, Gate(found_inf=one), rounding_seed=7)

table = Table({**both, "momentum_buffer": some, "radius": [torch.ones(1), None]}, rows)
found = step.step(SGD, table, [momentum], Hyperball().factor_formula(SGD))
step.step(SGD, table, [momentum], Factors(found[:, 4], "direction", found[:, 4]))
