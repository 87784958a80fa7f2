"""Measurements of a device for the throughput bench."""

import ctypes
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
WARM_UP = 0.5
"""Seconds of work before the clock rate is measured."""

NOT_SUPPORTED = 801
"""The error of a GPU whose L2 has no priorities."""


def here() -> torch.device:
    """Returns the GPU, or the CPU of a machine that has no GPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Clock:
    """Times calls on one device, in seconds; each call is one sample. This one is the clock of the host.

    It runs on any machine, to test the bench itself. `CudaClock` replaces its methods.

    Attributes:
        timed: the quantity that `device_seconds` measures.
        graphs: whether `graph` captures, for which optimizers have to be made `capturable`.
    """

    timed = "host clock"
    graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def wall_seconds(self, call: Call) -> tuple[float, float]:
        """Until the call returns, and until the device is done; idle before."""
        start = time.perf_counter()
        call()
        seconds = time.perf_counter() - start
        return seconds, seconds

    def device_seconds(self, call: Call, *, flush: bool, host: float) -> float:
        """Between the first and the last kernel of a call, L2 flushed before or not; `host` is its time on the host."""
        return self.wall_seconds(call)[0]

    def graph(self, call: Call) -> Call:
        """Returns a function that replays a call, which is captured once."""
        return call

    def launches(self, call: Call) -> dict[str, int]:
        """Kernels and copies of a call."""
        call()
        return {"kernels": 0, "copies": 0}

    def profiled(self, call: Call) -> None:
        """Lets an external profiler see only this call, with L2 flushed before."""
        call()

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        """The result of a call, and its peak memory above the memory in use before."""
        return call(), 0

    def free_bytes(self) -> int:
        """Memory that is left."""
        return 1 << 30


class CudaClock(Clock):
    """Events, graphs and the profiler of a GPU."""

    timed = "GPU time by events"
    graphs = True

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        size = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._flushed = torch.zeros(size // 2, dtype=torch.float32, device=self.device)
        # an idle GPU runs at a fraction of its clock rate
        warm = time.perf_counter() + WARM_UP
        while time.perf_counter() < warm:
            self._flush()
            torch.cuda.synchronize()
        self._cycles_per_second = 10**7 / self._seconds(lambda: self._sleep(10**7))

    @staticmethod
    def _seconds(call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e-3

    @staticmethod
    def _sleep(cycles: int) -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call,unused-ignore]

    def _flush(self) -> None:
        """Reads memory of twice the size of L2. Lines that a flush writes would be written back during the call.

        Lines that were loaded with `evict_last` stay in L2 after a read, unless the driver resets their priority first.
        """
        if torch.version.cuda is not None:
            code = ctypes.CDLL("libcuda.so.1").cuCtxResetPersistingL2Cache()
            if code not in (0, NOT_SUPPORTED):
                raise RuntimeError(f"cuCtxResetPersistingL2Cache() of the CUDA driver returned the error {code}")
        self._flushed.sum()

    def wall_seconds(self, call: Call) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        return returned - start, time.perf_counter() - start

    def device_seconds(self, call: Call, *, flush: bool, host: float) -> float:
        torch.cuda.synchronize()
        if flush:
            self._flush()
        # the host runs ahead while the device waits: no gaps between kernels, unless the call itself waits
        self._sleep(int(min(2 * host + 100e-6, 0.2) * self._cycles_per_second))
        return self._seconds(call)

    def graph(self, call: Call) -> Call:
        # steps before the capture, and the first replay, run one-time initializations
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def launches(self, call: Call) -> dict[str, int]:
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kinds = Counter(event.get("cat") for event in events)
        return {"kernels": kinds["kernel"], "copies": kinds["gpu_memcpy"] + kinds["gpu_memset"]}

    def profiled(self, call: Call) -> None:
        self._flush()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call,unused-ignore]
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call,unused-ignore]

    def peak_bytes(self, call: Call) -> tuple[Any, int]:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int:
        # graphs and their memory may be in reference cycles
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


def copy_bandwidth(clock: Clock, size: int) -> float:
    """Bytes read and written a second by a copy from one buffer to another, the median of ten."""
    source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = [clock.device_seconds(lambda: target.copy_(source), flush=True, host=0.0) for _ in range(10)]
    return 2 * size / statistics.median(seconds)


def clock_here() -> Clock:
    """Returns the clock of the device to measure."""
    return CudaClock() if torch.cuda.is_available() else Clock()
