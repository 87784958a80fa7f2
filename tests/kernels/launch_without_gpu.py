"""Run the host functions up to the launch itself: arguments bound and kernels compiled for a GPU that is not there.

A script of its own, since compiling and interpreting exclude each other within one process. Prints one line for
each launch: kernel, programs, warps, whether multiplication and addition are contracted.
"""

import importlib

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fused_lwlr import LAMB, LARC
from fused_lwlr.kernels import AdamWHyper, Factors, Gate, Row, SGDHyper, Table


class Driver:
    """As much of a driver as compiling needs."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class CompiledOnly:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*args, **options):
            compiled = self.kernel.warmup(*args, grid=grid, **options)
            print(self.kernel.fn.__name__, *grid, compiled.metadata.num_warps, compiled.metadata.enable_fp_fusion)

        return launch


driver.set_active(Driver())
sgd, adamw, statistics, update, queue = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{n}") for n in ("sgd", "adamw", "statistics", "update", "queue")
)
update.step_kernel, queue.queue_kernel = CompiledOnly(update.step_kernel), CompiledOnly(queue.queue_kernel)
statistics.statistics_kernel = CompiledOnly(statistics.statistics_kernel)

some, none = [torch.ones(3000), torch.ones(5)], [None, None]
both = {"param": some, "grad": some}
momentum = SGDHyper(lr=0.1, momentum=0.9)
sgd.sgd(Table({**both, "momentum_buffer": none}), [SGDHyper(lr=0.1)])
sgd.sgd(Table({**both, "momentum_buffer": [some[0], None]}), [momentum])
moments = {"exp_avg": some, "exp_avg_sq": some}
options = AdamWHyper(lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
adamw.adamw(Table({**both, **moments, "max_exp_avg_sq": none}), [options])
adamw.adamw(Table({**both, **moments, "max_exp_avg_sq": [some[0], None]}), [options])
statistics.statistics(Table(both))

sgd.sgd(Table({**both, "momentum_buffer": some}), [momentum], LAMB().scale("sgd"))
adamw.adamw(Table({**both, **moments}), [options], LAMB().scale("adamw"))
steps = {"step": [torch.zeros(()), torch.zeros(())]}
rows = [Row(0, scaled=True, power=1, anchor=True), Row(1, scaled=True)]
for operation, columns, hyper in ((sgd.sgd, {"momentum_buffer": some}, momentum), (adamw.adamw, moments, options)):
    table = Table({**both, **columns, **steps}, rows)
    totals, _ = statistics.totals(table, grad=True, weight=True)
    one = torch.ones(())
    gate = Gate(totals, 1.0, skip=True, grad_scale=one, found_inf=one)
    operation(table, [hyper], LARC().scale(operation.__name__), gate)
    measured = operation(table, [hyper], LARC().scale(operation.__name__), gate, write=False)
    half = [t.bfloat16() for t in some]
    columns = {"param": half, "grad": half, "master_weight": some, **columns, **steps}
    factors = Factors(measured[:, 4], "gradient")
    operation(Table(columns, rows), [hyper._replace(lr=one)], factors, Gate(found_inf=one), rounding_seed=7)
