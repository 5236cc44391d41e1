# `make demo` runs the main job, `make test` the tests. Both set up .venv first; Python 3.11 (or 3.10, 3.12), gcc and
# make are all that must be there. pip's own settings decide where packages come from.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: venv demo test test-all test-quick test-servers test-soak test-flydsl test-mi300x bench-kernels bench-sim lint \
	format docs clean

venv: $(STAMP)

# --no-deps throughout: the lock is a closed set, and SGLang's own list would pull several GB of CUDA packages.
$(STAMP): requirements/cpu.lock requirements/eval.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r requirements/cpu.lock -r requirements/eval.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m sglang_dflash_rocm.cpu.torchvision_shim
	touch $@

demo: $(STAMP)
	$(BIN)/dflash-rocm demo

SELECTED ?= not slow and not soak
test-all: SELECTED = not soak
test test-all: test-quick test-servers
.NOTPARALLEL:

# A server, or a job of ranks, is several processes and has the machine for itself; the rest shares it.
test-quick: $(STAMP)
	$(BIN)/python -m pytest -m "not server and $(SELECTED)" -n logical --maxprocesses 8 --dist loadfile

test-servers: $(STAMP)
	$(BIN)/python -m pytest -m "server and $(SELECTED)"

test-soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -s

# The attention kernels compiled by another FlyDSL than the lock's: make test-flydsl FLYDSL=0.3.1. Planted faults are left
# out: up to 0.4 FlyDSL caches on disk by the name of a kernel and would hand out the sound one.
FLYDSL ?= 0.3.1
test-flydsl: $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/flydsl-$(FLYDSL) flydsl==$(FLYDSL)
	PYTHONPATH=build/flydsl-$(FLYDSL) $(BIN)/python -m pytest -m "not slow" -k "not fault" test/registered/attention/test_mimo_flydsl_* \
		test/registered/attention/test_mimo_flypa_nan_tail.py test/registered/attention/test_aiter_mimo_vectorized_5d.py

# The registered tests on the hardware, in the Python of SGLang's ROCm image, which keeps its torch, triton and SGLang.
test-mi300x:
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	$(PYTHON) -c "import sglang_dflash_rocm.gate as g; g.gfx942_present() or exit('no gfx942 GPU (MI300X) here; without one: make test')"
	$(PYTHON) -m pytest -m "not slow" test/registered --ignore test/registered/amd

# Modelled on gfx942 code objects; see docs/kernels.md.
bench-kernels: $(STAMP)
	$(BIN)/python benchmark/kernels/bench_paged_attention.py

bench-sim: $(STAMP)
	$(BIN)/python benchmark/sim/bench_simulator.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist
