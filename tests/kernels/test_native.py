"""Kernels on CPUs: the translator to C, its assumptions, threads and processes."""

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from cases import long
from tables import HYPER, RULES, equal, make, totals, twin
from tolerances import same
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_lwlr
from fused_lwlr import backends
from fused_lwlr.kernels import Gate, reference
from fused_lwlr.kernels import triton as backend
from fused_lwlr.kernels.native import build, c, compile_kernel, control
from fused_lwlr.kernels.native.c_library import compiler
from fused_lwlr.kernels.native.ttir import UnsupportedError

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU"),
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels run in the interpreter"),
    pytest.mark.usefixtures("optimize"),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CPU = torch.device("cpu")
HALVES = (torch.bfloat16, torch.float16)
LAMB = fused_lwlr.LAMB().factor_formula(RULES["adamw"])


def run(kernel, *arguments, programs=1, **meta):
    compile_kernel(kernel, arguments, meta)(programs, arguments, False)


@triton.jit
def convert(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count), mask=offsets < count)


def same_numbers(found, expected):
    """Asserts equal bits, except that all NaNs are equal."""
    integer = {2: torch.int16, 4: torch.int32}[expected.itemsize]
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    assert torch.equal(found[~nan].view(integer), expected[~nan].view(integer))


def converted(source, dtype):
    target = torch.empty(source.shape, dtype=dtype)
    run(convert, source, target, source.numel(), programs=-(-source.numel() // 4096), BLOCK=4096)
    return target


@pytest.fixture(params=[False, True], ids=["denormals", "flushed denormals"])
def flushes(request):
    """Sets the mode of torch for denormal numbers, on the thread that runs the kernel."""

    def start():
        if not torch.set_flush_denormal(request.param):
            pytest.skip("this CPU cannot flush denormals")

    yield start
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_precision_number_is_read_exactly(dtype, flushes):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = every.float()
    flushes()
    same_numbers(converted(every, torch.float32), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_single_precision_is_rounded_to_the_nearest_and_to_even(dtype, flushes):
    """Tests each number in half precision, each midpoint of two, and the float32 numbers next to them."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    low, high = every[:-1], every[1:]
    middle = ((low.double() + high.double()) / 2).float()
    bits = torch.cat([every, middle]).view(torch.int32)
    source = torch.cat([bits, bits + 1, bits - 1, bits + 3]).view(torch.float32)
    assert source.numel() > 300_000
    expected = source.to(dtype)
    flushes()
    same_numbers(converted(source, dtype), expected)


@triton.jit
def sine(x, y):
    tl.store(y, tl.sin(tl.load(x)))


@triton.jit
def prefix_sums(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.cumsum(tl.load(x + offsets), 0))


@triton.jit
def product(x, y, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    square = tl.load(x + offsets[:, None] * BLOCK + offsets[None, :])
    tl.store(y + offsets, tl.sum(tl.dot(square, square), axis=1))


@pytest.mark.parametrize(
    ("kernel", "meta", "named"),
    [(sine, {}, "math.sin"), (prefix_sums, {"BLOCK": 16}, "tt.scan"), (product, {"BLOCK": 16}, "tt.expand_dims")],
)
def test_an_unknown_operation_is_refused_by_name(kernel, meta, named):
    with pytest.raises(UnsupportedError, match=named):
        compile_kernel(kernel, (torch.ones(256), torch.ones(256)), meta)


@triton.jit
def two_masks(x, y, first, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    value = tl.load(x + offsets)
    tl.store(y + offsets, value + 1, mask=offsets < first)
    tl.store(y + BLOCK + offsets, value + 2, mask=offsets < 2 * first)
    tl.store(y + 2 * BLOCK + offsets, value + 3)


def test_stores_in_one_loop_have_their_own_masks():
    found = torch.zeros(3, 64)
    run(two_masks, torch.zeros(64), found, 5, BLOCK=64)
    assert found.count_nonzero(dim=1).tolist() == [5, 10, 64]


@triton.jit
def without_sign(x, y):
    tl.store(y, tl.load(x).to(tl.uint32, bitcast=True).to(tl.int64))


def test_numbers_without_a_sign_are_widened_by_zeros():
    found = torch.zeros(1, dtype=torch.int64)
    run(without_sign, torch.tensor([-1], dtype=torch.int32), found)
    assert found.item() == 2**32 - 1


def step(table, threads):
    """Takes two steps with all kinds of partial sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            gate = Gate(totals(backend, table), 3.0, skip=True)
            found = backend.step(RULES["adamw"], table, HYPER["adamw"], LAMB, gate)
        return found, backend.statistics(table)
    finally:
        torch.set_num_threads(before)


def test_same_bits_for_any_number_of_threads():
    first = make("adamw", [(300_000,), (7,), (70_000, 3), ()], torch.float32, CPU)
    others = {threads: twin(first) for threads in (2, 3, 7)}
    expected = step(first, 1)
    for threads, table in others.items():
        for found, value in zip(step(table, threads), expected, strict=True):
            same(found, value)
        equal(table, first, same)


@pytest.mark.parametrize("dtype", [torch.float32, long(torch.float16)])
def test_kernels_without_optimization_have_the_same_bits(dtype, optimize):
    """Most tests compile without optimization, so that they take less time, and results hold for users."""
    first = make("adamw", [(3_000,), (7,), (70, 3), ()], dtype, CPU)
    other = twin(first)
    expected = step(first, 1)
    optimize(False)
    try:
        assert "-O0" in build._flags()
        found = step(other, 1)
    finally:
        optimize(True)
    assert "-O0" not in build._flags()
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
    equal(other, first, same)


def test_two_optimizers_in_two_threads():
    tables = [make("adamw", [(200_000,), (7,)], torch.float32, CPU) for _ in range(2)]
    expected, failed = [twin(table) for table in tables], []

    def work(table):
        try:
            for _ in range(5):
                step(table, 2)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(table,)) for table in tables]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for table, alone in zip(tables, expected, strict=True):
        work(alone)
        equal(table, alone, same)


def python(code, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "before"), [("momentum=0.9, scaling=fused_lwlr.LARS()", "optimizer.step()"), ("momentum=0", "")]
)
def test_a_process_that_is_forked_steps(options, before):
    """A child process does not have the threads of OpenMP, and must not wait for them, also in its first step."""
    code = f"""
import os, torch, fused_lwlr
torch.set_num_threads(4)
p = torch.nn.Parameter(torch.ones(500_000))
p.grad = torch.ones_like(p)
optimizer = fused_lwlr.SGD([p], lr=0.1, {options})
{before}
child = os.fork()
optimizer.step()
if child:
    assert os.waitpid(child, 0)[1] == 0
print(hash(p.detach().numpy().tobytes()), flush=True)
if not child:
    os._exit(0)
"""
    first, second = python(code).split()
    assert first == second


@pytest.mark.long
def test_workers_of_a_data_loader_start_after_a_step():
    code = """
import torch, fused_lwlr
torch.set_num_threads(4)
model = torch.nn.Linear(500, 500)
optimizer = fused_lwlr.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(8, 500))
for _ in range(2):
    for batch, in torch.utils.data.DataLoader(data, batch_size=2, num_workers=2):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
print(len(optimizer.state))
"""
    assert python(code) == "2\n"


def clear_caches():
    for function in (compiler, build._flags, build._function, backends._problem_on_cpu, backends._warn):
        function.cache_clear()


@pytest.fixture
def without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    clear_caches()
    yield
    monkeypatch.undo()
    clear_caches()


def stepped(count, **options):
    """The first of `count` ones after steps of SGD with gradients of 1 and a learning rate of 0.5, and warnings."""
    p = torch.nn.Parameter(torch.ones(count))
    p.grad = torch.ones_like(p)
    optimizer = fused_lwlr.SGD([p], lr=0.5, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step()
    # the line of the user
    assert all(warning.filename == __file__ for warning in caught)
    return p[0].item(), [str(warning.message) for warning in caught]


@pytest.mark.usefixtures("without_a_compiler")
def test_without_a_compiler_the_reference_steps_and_says_so_once():
    assert stepped(999_999) == (0.0, [])
    value, [warning] = stepped(1_000_000)
    assert value == 0.0
    assert "PyTorch reference on this CPU" in warning
    assert "the C compiler does not run" in warning
    assert stepped(1_000_000) == (0.0, [])


@pytest.mark.usefixtures("without_a_compiler")
def test_triton_without_a_compiler_is_an_error():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones_like(p)
    message = "^backend='triton' cannot run on this CPU: the C compiler does not run.*or pass backend='torch'$"
    with pytest.raises(RuntimeError, match=message):
        fused_lwlr.SGD([p], lr=0.5, backend="triton").step()
    assert p.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.long
@pytest.mark.skipif("gcc" not in compiler()[0][0], reason="needs the report of gcc about vectorized loops")
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_every_loop_over_elements_is_vectorized(dtype, monkeypatch, tmp_path):
    """A loop without vector instructions has the right values, but can make a step ten times slower."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    build._function.cache_clear()
    tables = {name: make(name, [(40_000,)], dtype, CPU) for name in ("sgd", "adamw", "statistics")}
    backend.statistics(tables["statistics"])
    backend.step(RULES["sgd"], tables["sgd"], HYPER["sgd"])
    backend.step(RULES["adamw"], tables["adamw"], HYPER["adamw"], LAMB)
    build._function.cache_clear()
    sources = sorted(tmp_path.rglob("*_kernel-*.c"))
    assert len(sources) == 3
    for source in sources:
        lines = source.read_text().splitlines()
        starts = [number for number, line in enumerate(lines, 2) if line.strip() == "LANES"]
        assert starts
        command = [*compiler()[0], *build._flags(), "-fopt-info-vec-optimized", "-c", source, "-o", tmp_path / "object"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        vectorized = {int(line) for line in re.findall(r":(\d+):\d+: optimized: loop vectorized", said)}
        for start in set(starts) - vectorized:
            loop = "\n".join(lines[start - 1 : start + 10])
            # samples of a tile are not contiguous
            assert "bf16 *const" in loop or "f16 *const" in loop or "float *const" in loop, loop


def test_modes_and_defaults_at_the_first_step_change_nothing():
    """The first step decides for all later steps that kernels can be compiled."""
    backends._problem_on_cpu.cache_clear()
    build._function.cache_clear()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"), FakeTensorMode():
            assert backends._problem_on_cpu() is None
    finally:
        torch.set_default_dtype(torch.float32)
    assert backends.pick("auto", CPU, torch.float32) is backend


@triton.jit
def wait_for_nobody(flag):
    while tl.atomic_add(flag, 0, sem="acquire") == 0:
        pass


@pytest.mark.long
def test_no_program_waits_forever(monkeypatch):
    monkeypatch.setattr(build, "WAIT", 1)
    with pytest.raises(RuntimeError, match="wait_for_nobody: a thread waited 1 s for another"):
        run(wait_for_nobody, torch.zeros(1, dtype=torch.int32))
    run(wait_for_nobody, torch.ones(1, dtype=torch.int32))


TSAN = subprocess.run(
    ["gcc", "-print-file-name=libtsan.so"], capture_output=True, text=True, check=False
).stdout.strip()


@pytest.mark.long
@pytest.mark.skipif(not Path(TSAN).is_absolute(), reason="gcc has no libtsan")
def test_no_race_and_every_memory_order_is_needed(tmp_path):
    """ThreadSanitizer finds no data race between six threads, but finds one if any memory order is relaxed."""
    environment = {**os.environ, "LD_PRELOAD": TSAN, "TSAN_OPTIONS": f"exitcode=0:log_path={tmp_path}/log"}
    result = subprocess.run(
        [sys.executable, HERE / "races.py", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    found = [line.split() for line in result.stdout.splitlines()]
    assert [line[0] for line in found] == 5 * ["queue"] + 2 * ["statistics"]
    assert [line for line in found if (int(line[3]) > 0) != (line[1] != "None")] == []


def _first_of_two(writer, block, a, b):
    return a


def _other_value(writer, loop, op, before):
    place, condition = writer._address(loop, op, op.operands[1:], before)
    return place if condition == "1" else "1"


# wrong rules of the translator
MUTATIONS = {
    "difference": (c.TEMPLATES, "arith.subf", "{0} + {1}"),
    "product": (c.TEMPLATES, "arith.mulf", "{0} + {1}"),
    "quotient": (c.TEMPLATES, "arith.divf", "{0} * {1}"),
    "maximum": (c.TEMPLATES, "arith.maxnumf", "{0} < {1} ? {0} : {1}"),
    "choice": (c.TEMPLATES, "arith.select", "{0} ? {2} : {1}"),
    "above": (c.TEMPLATES, "arith.cmpf ogt", "{0} < {1}"),
    "rounding": (c, "PRELUDE", c.PRELUDE.replace("+ 0x7fff +", "+")),
    "reading": (c, "PRELUDE", c.PRELUDE.replace("x << 16", "x << 15")),
    "reduction": (control.Writer, "_combine", _first_of_two),
    "lanes without an element": (control.Writer, "_load", _other_value),
}


@pytest.fixture
def same_ttir(monkeypatch):
    """Keeps what Triton makes of a kernel, which takes longest and does not depend on the translator."""
    make = build.ttir

    def kept(source):
        name = source.hash()
        if name not in TTIR:
            TTIR[name] = make(source)
        return TTIR[name]

    monkeypatch.setattr(build, "ttir", kept)


TTIR = {}


def values():
    """Returns numbers that depend on each rule in `MUTATIONS`, from the kernels and from the reference."""
    found = []
    for module in (backend, reference):
        torch.manual_seed(0)
        table = make("adamw", [(5,), (700,)], torch.bfloat16, CPU)
        statistics = module.statistics(table)
        gate = Gate(statistics.new_tensor([4.0, 0.0, 1.0, 0.0, 0.0]), 3.0)
        measured = module.step(RULES["adamw"], table, HYPER["adamw"], LAMB, gate)
        columns = [tensor.double().flatten() for column in table.columns.values() for tensor in column]
        found.append([statistics.flatten(), measured.double().flatten(), *columns])
    return found


def agree(found, expected):
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.usefixtures("same_ttir")
def test_lanes_do_not_depend_on_one_another(monkeypatch, tmp_path):
    """Tests the promise to compilers: all loops over lanes give the same bits backwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found, backwards = [], 0
    for turned in (False, True):

        def written(function, most_wait, turned=turned):
            nonlocal backwards
            text = control.c_code(function, most_wait)
            if turned:
                loop = r"for \(int64_t i = ([^;]+); i < ([^;]+); i\+\+\)"
                text, count = re.subn(loop, r"for (int64_t i = \2 - 1; i >= \1; i--)", text)
                backwards += count
            return text

        monkeypatch.setattr(build, "c_code", written)
        monkeypatch.setattr(build, "_key", lambda turned=turned: f"{turned}")
        build._function.cache_clear()
        found.append(values()[0])
    build._function.cache_clear()
    assert backwards > 100
    for forwards, other in zip(*found, strict=True):
        same(forwards, other)


@pytest.mark.long
@pytest.mark.usefixtures("same_ttir")
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_a_wrong_rule_of_the_translator_is_noticed(name, monkeypatch, tmp_path, optimize):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    optimize(False)
    if name is not None:
        owner, key, rule = MUTATIONS[name]
        (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, key, rule)
        if key == "PRELUDE":
            monkeypatch.setattr(control, key, rule)
    try:
        assert agree(*values()) == (name is None)
    finally:
        optimize(True)
