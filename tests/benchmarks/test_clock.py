"""Calls of the GPU's clock to torch.cuda, and their order, with a fake that logs them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from bench import clock


class Stream:
    def wait_stream(self, other):
        pass


class Stand:
    """A fake torch with a GPU whose work takes no time."""

    def __init__(self, log):
        self._log, self._time = log, 0.0
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            Event=self._event, Stream=Stream, current_stream=Stream, stream=contextlib.nullcontext,
            CUDAGraph=self._graph, graph=contextlib.nullcontext, _sleep=self._sleep,
            synchronize=lambda: log.append("wait"), memory_allocated=lambda: 100, max_memory_allocated=lambda: 350,
            reset_peak_memory_stats=lambda: log.append("reset"), empty_cache=lambda: None,
            profiler=SimpleNamespace(start=lambda: log.append("profile"), stop=lambda: log.append("end of profile")),
            mem_get_info=lambda: (7, 9),
            get_device_properties=lambda device: SimpleNamespace(
                L2_cache_size=1000
            ),
        )  # fmt: skip

    def __getattr__(self, name):
        return getattr(torch, name)

    def device(self, name):
        assert name == "cuda"
        return torch.device("cpu")

    def zeros(self, size, **options):
        self._log.append(f"buffer of {size}")
        return SimpleNamespace(sum=lambda: self._log.append("flush"))

    def _sleep(self, cycles):
        # a clock of 2 GHz
        self._time += cycles / 2e9
        self._log.append(f"sleep {cycles}")

    def _event(self, enable_timing):
        assert enable_timing
        event = SimpleNamespace(at=None)

        def record():
            event.at = self._time
            self._log.append("record")

        event.record = record
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def _graph(self):
        return SimpleNamespace(replay=lambda: self._log.append("replay"))


@pytest.fixture
def log():
    return []


@pytest.fixture
def gpu(log, monkeypatch):
    monkeypatch.setattr(clock, "torch", Stand(log))
    monkeypatch.setattr(clock, "WARM_UP", 0.001)
    driver = SimpleNamespace(cuCtxResetPersistingL2Cache=lambda: log.append("priorities") or log[0].startswith("fail"))
    monkeypatch.setattr(clock.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    made = clock.CudaClock()
    # single precision, twice the cache
    assert log[:4] == ["buffer of 500", "priorities", "flush", "wait"]
    log.clear()
    return made


@pytest.mark.parametrize("flush", [False, True])
def test_only_the_call_is_between_the_events(gpu, log, flush):
    """The device sleeps for longer than the host needs; the flush before is not timed."""

    def call():
        log.append("call")
        clock.torch._time += 3e-6

    assert gpu.device_seconds(call, flush=flush, host=1e-3) == pytest.approx(3e-6, rel=1e-6)
    slept = int((2e-3 + 100e-6) * 2e9)
    middle = [entry for entry in log if not entry.startswith("sleep")]
    assert middle == ["wait", *(["priorities", "flush"] if flush else []), "record", "call", "record", "wait"]
    (sleep,) = [entry for entry in log if entry.startswith("sleep")]
    assert int(sleep.split()[1]) == pytest.approx(slept, rel=1e-6)
    assert log.index(sleep) == log.index("record") - 1


def test_a_profiler_sees_the_call_alone(gpu, log):
    gpu.profiled(lambda: log.append("call"))
    assert log == ["priorities", "flush", "wait", "profile", "call", "wait", "end of profile"]


def test_a_flush_that_fails_is_an_error(gpu, log):
    log.append("fail")
    with pytest.raises(RuntimeError, match="cuCtxResetPersistingL2Cache"):
        gpu.profiled(lambda: None)


def test_wall_time_ends_when_the_device_is_done(gpu, log):
    host, wall = gpu.wall_seconds(lambda: log.append("call"))
    assert log == ["wait", "call", "wait"]
    assert 0 < host <= wall


def test_a_graph_is_warmed_up_and_replayed(gpu, log):
    replay = gpu.graph(lambda: log.append("call"))
    assert log == ["call"] * 3 + ["call", "replay", "wait"]
    replay()
    assert log[-1] == "replay"


def test_memory(gpu, log):
    assert gpu.peak_bytes(lambda: log.append("call")) == (None, 250)
    assert log == ["wait", "reset", "call", "wait"]
    assert gpu.free_bytes() == 7


def test_kernels_are_counted_from_the_trace(gpu, monkeypatch):
    """The profiler's annotations on the device's lane are not counted."""
    kinds = ["kernel", "kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation", "cpu_op", None]

    class Profile(contextlib.nullcontext):
        def __init__(self, activities):
            super().__init__(self)

        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                clock.json.dump({"traceEvents": [{"cat": kind} if kind else {} for kind in kinds]}, file)

    profiler = SimpleNamespace(profile=Profile, ProfilerActivity=torch.profiler.ProfilerActivity)
    monkeypatch.setattr(clock.torch, "profiler", profiler, raising=False)
    assert gpu.launches(lambda: None) == {"kernels": 2, "copies": 2}


def test_copies_count_reads_and_writes(monkeypatch):
    """16 bytes read and 16 written in 4 seconds."""
    host = clock.Clock()
    monkeypatch.setattr(host, "device_seconds", lambda call, flush, host: 4.0)
    assert clock.copy_bandwidth(host, 16) == 8
