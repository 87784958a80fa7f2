"""Where the tests run: on the GPU where there is one, else through Triton's interpreter."""

import importlib
import importlib.util
import inspect
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()


def round_to_nearest():
    """Let the interpreter round float32 to bfloat16 as every GPU does; of itself it cuts off."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding(self, source, dtype):
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        bits = torch.tensor(source.data).bfloat16().view(torch.int16).numpy()
        return TensorHandle(bits.view("uint16"), dtype.scalar)

    InterpreterBuilder.cast_impl = rounding


def look_up_once():
    """Let the interpreter keep what it looks up in every call of every function: it takes a third less time then."""
    from triton import language as tl
    from triton.runtime import interpreter

    places = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    builtins = {place: inspect.getmembers(place, tl.core.is_builtin) for place in places}

    def replace(place, *scope):
        for name, member in builtins[place]:
            if getattr(place, name) is member:
                interpreter._patch_attr(place, name, member, *scope)

    interpreter._patch_builtin = replace


if not HAS_GPU:
    # read once, when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"
    round_to_nearest()
    look_up_once()
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # the same examples on every run; the long one finds new ones each time, and prints how to repeat a failure
    settings.register_profile("short", max_examples=100, derandomize=True, deadline=None)
    settings.register_profile("long", max_examples=1000, deadline=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
# the networks here are tiny: threads that wait for one another take longer than one, the more so beside other workers
torch.set_num_threads(1)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def third_party():
    """Imports a package that imports torchvision, also if that was built for another torch; skips if not installed."""

    def load(name):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
        try:
            import torchvision  # noqa: F401
        except ModuleNotFoundError:
            pass
        except RuntimeError:
            # a CPU build of torch beside a torchvision whose compiled operators do not load: give it their schemas
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            for op in ("nms", "qnms"):
                torch.library.define(f"torchvision::{op}", schema)
        return importlib.import_module(name)

    return load


@pytest.fixture(scope="session")
def timm(third_party):
    return third_party("timm")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not HAS_GPU:
        pytest.skip("needs a GPU")
