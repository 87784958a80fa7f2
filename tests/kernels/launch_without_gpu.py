"""Run the host functions up to the launch: kernels are compiled, loaded and called for a GPU that is not present.

This is a separate script, since it replaces the driver. With the argument "stub" Triton's launcher calls a driver
without a GPU, see stub_driver.py. Prints one line for each launch: kernel, programs, warps, whether multiplication and
addition are contracted, registers at most.
"""

import importlib
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fused_lwlr import LAMB, LARC, Hyperball
from fused_lwlr.kernels import ADAMW, SGD, Factors, Gate, Hyper, Row, Table, totals_of


class Utils:
    """The driver functions for a compiled kernel."""

    def load_binary(self, name, kernel, shared, device):
        return None, name, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 17}


class Launcher:
    """Checks that the launch arguments match the signature that the kernel was compiled for."""

    def __init__(self, source, metadata):
        self.signature = list(source.signature.values())
        self.metadata = metadata

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *args):
        assert len(args) == len(self.signature)
        for kind, arg in zip(self.signature, args, strict=True):
            if kind.startswith("*"):
                assert NAMES[kind[1:]] == arg.dtype, (kind, arg)
            elif kind != "constexpr":
                assert isinstance(arg, float if kind.startswith("fp") else int), (kind, arg)
        print(function, x, self.metadata.num_warps, self.metadata.enable_fp_fusion, self.metadata.maxnreg)


class Driver:
    """The part of a driver that compiling, loading and launching use."""

    utils = Utils()
    launcher_cls = Launcher

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


NAMES = {"i64": torch.int64, "i32": torch.int32, "fp32": torch.float32, "fp64": torch.float64}
if sys.argv[1:] == ["stub"]:
    import stub_driver

    driver.set_active(stub_driver.Driver())
else:
    driver.set_active(Driver())
launch, step, statistics = (
    importlib.import_module(f"fused_lwlr.kernels.triton.{n}") for n in ("launch", "step", "statistics")
)
# CPU tensors replace GPU tensors
launch.is_native = lambda device: False

some, none = [torch.ones(3000), torch.ones(5)], [None, None]
both = {"param": some, "grad": some}
own = {"momentum": 0.9, "dampening": 0.0, "nesterov": False}
momentum = Hyper(lr=0.1, numbers=SGD.numbers(own, True))
plain = Hyper(lr=0.1, numbers=SGD.numbers({**own, "momentum": 0.0}, True))
step.step(SGD, Table({**both, "momentum_buffer": none}), [plain])
step.step(SGD, Table({**both, "momentum_buffer": [some[0], None]}), [momentum])
moments = {"exp_avg": some, "exp_avg_sq": some}
options = Hyper(lr=0.1, weight_decay=0.1, numbers=ADAMW.numbers({"betas": (0.9, 0.999), "eps": 1e-8}, True))
step.step(ADAMW, Table({**both, **moments, "max_exp_avg_sq": none}), [options])
step.step(ADAMW, Table({**both, **moments, "max_exp_avg_sq": [some[0], None]}), [options])
statistics.statistics(Table(both))

step.step(SGD, Table({**both, "momentum_buffer": some}), [momentum], LAMB().scale(SGD))
step.step(ADAMW, Table({**both, **moments}), [options], LAMB().scale(ADAMW))
steps = {"step": [torch.zeros(()), torch.zeros(())]}
rows = [Row(0, scaled=True, power=1, counts_for_max_norm=True), Row(1, scaled=True)]
for rule, columns, hyper in ((SGD, {"momentum_buffer": some}, momentum), (ADAMW, moments, options)):
    table = Table({**both, **columns, **steps}, rows)
    one = torch.ones(())
    totals = totals_of([statistics.statistics(table, grad_scale=one)], [torch.tensor([True, False])])
    gate = Gate(totals, 1.0, skip=True, grad_scale=one, found_inf=one)
    step.step(rule, table, [hyper], LARC().scale(rule), gate)
    measured = step.step(rule, table, [hyper], LARC().scale(rule), gate, write=False)
    half = [t.bfloat16() for t in some]
    columns = {"param": half, "grad": half, "master_weight": some, "ema": some, **columns, **steps}
    factors = Factors(measured[:, 4], "gradient")
    step.step(rule, Table(columns, rows), [hyper._replace(lr=one)], factors, Gate(found_inf=one), rounding_seed=7)

radii = {"radius": [torch.ones(1), None]}
for rule, columns, hyper in ((SGD, {"momentum_buffer": some}, momentum), (ADAMW, moments, options)):
    table = Table({**both, **columns, **radii}, rows)
    found = step.step(rule, table, [hyper], Hyperball().scale(rule))
    step.step(rule, table, [hyper], Factors(found[:, 4], "direction", found[:, 4]))
