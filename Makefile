# make demo: train small Transformers on Python's documentation.  make test: the test suite.
# Both set up their own virtual environment; a second run starts at once.

PYTHON ?= python3
VENV ?= .venv
# releases that go together
TORCH ?= 2.13.0
TORCHVISION ?= 0.28.0
BIN := $(VENV)/bin
# modules are compiled when they are first imported, which few of those installed are; then what was compiled is kept
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE
# neighbouring tests share fixtures and kernels: each worker starts with one half of them
PARALLEL := -n 2 --dist worksteal

.PHONY: demo environments test test-long test-interpreted test-all test-triton-3.4 test-triton-3.6 test-triton-3.7 \
	fashion-mnist fuzz codegen lint docs dist gpu bench bench-gpu bench-host clean

demo: $(VENV)/.demo
	$(BIN)/fused-lwlr demo

# kernels are compiled for this CPU
test: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m "not long"

# the data set of a long test, on Debian and Ubuntu
fashion-mnist:
	sudo apt-get update && sudo apt-get install -y dataset-fashion-mnist

# training runs, studies, machine code, several processes, races and other libraries' trainers; then the interpreter
test-long: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) -m long
	$(MAKE) test-interpreted

# Triton's interpreter tells integers that overflow and lets programs overlap: each way through a kernel once, since
# values are compared where kernels are compiled
test-interpreted: $(VENV)/.dev
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(PARALLEL) tests/kernels \
		-k "overflows or test_queue or test_all_shapes or test_slices or test_averages or on_their_spheres or rescaled_rows \
		or against_float64 or int32_offsets or (stochastic_rounding and adamw)"

# what the three above run, with one start
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest $(PARALLEL) --durations=30
	$(MAKE) test-interpreted

# what runs kernels once more, with the oldest triton that the package allows
test-triton-3.4: $(VENV)/.dev $(VENV)/triton-3.4.0
	PYTHONPATH=$(VENV)/triton-3.4.0 $(BIN)/python -m pytest $(PARALLEL) tests/kernels tests/optim/test_scaling_custom.py \
		-k "kernels and (queue or rounding or statistics or twins and not any_shapes) or name_outside"

# and with the oldest that GPU machines around us have
test-triton-3.6: $(VENV)/.dev $(VENV)/triton-3.6.0
	PYTHONPATH=$(VENV)/triton-3.6.0 $(BIN)/python -m pytest $(PARALLEL) tests/kernels tests/optim/test_scaling_formulas.py \
		-k "kernels and (codegen or launch or queue or rounding or statistics or twins and not any_shapes) or paper_triton"

# what compiles kernels, with the triton that torch 2.13 brings along where there is a GPU
test-triton-3.7: $(VENV)/.dev $(VENV)/triton-3.7.1
	PYTHONPATH=$(VENV)/triton-3.7.1 $(BIN)/python -m pytest $(PARALLEL) tests/kernels/test_codegen.py

# all that the tests above need
environments: $(VENV)/.dev $(VENV)/triton-3.4.0 $(VENV)/triton-3.6.0 $(VENV)/triton-3.7.1

# 4,000 random sequences of operations, other ones on every run
fuzz: $(VENV)/.dev
	$(BIN)/python -m pytest tests/optim/test_fuzz.py --hypothesis-profile=long

# the machine code of every kernel for every target; the long tests look at the largest kernels of some targets
codegen: $(VENV)/.dev
	EVERY_KERNEL=1 $(BIN)/python -m pytest $(PARALLEL) tests/kernels/test_codegen.py

# all that this machine can measure; GPU throughput alone; host times alone
bench: $(VENV)/.dev
	$(BIN)/python -m bench

bench-gpu: $(VENV)/.dev
	$(BIN)/python -m bench --gpu

bench-host: $(VENV)/.dev
	$(BIN)/python -m bench --only host --out runs/bench-host

# the tests and figures of a GPU's first half hour: every stage, into runs/gpu-day; bench/README.md has more
gpu: $(VENV)/.dev
	for stage in smoke tests memcheck bench ncu sweep offload training studies; do \
		PATH="$(abspath $(BIN)):$$PATH" python -m bench.gpu_day $$stage --out runs/gpu-day || failed=1; done; test -z "$$failed"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the site, into build/site; a warning is an error
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# the source distribution and the wheel, built without torch
dist: $(VENV)/release/.done
	rm -rf dist
	$(VENV)/release/bin/python -m build
	$(VENV)/release/bin/twine check --strict dist/*

$(VENV)/release/.done:
	$(PYTHON) -m venv $(VENV)/release
	$(VENV)/release/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	touch $@

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed; try: make PYTHON=python3.11" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH)
	# a GPU build of torch brings the triton it was made for
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[cli]'
	touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml tests/torchvision_operators.py
	$(PIP) torch==$(TORCH) torchvision==$(TORCHVISION) -e '.[dev]'
	# beside a torch for CPUs, a torchvision for GPUs cannot be imported as it is
	$(BIN)/python tests/torchvision_operators.py
	touch $@ $(VENV)/.demo

$(VENV)/triton-%: | $(VENV)/.torch
	$(PIP) --no-deps --target $@ triton==$*

clean:
	rm -rf $(VENV) build dist *.egg-info
