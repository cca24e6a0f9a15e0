# Two commands do everything: `make run` (set up, then the demo) and `make test` (set up, then all tests).
# TORCH=2.11.0 does the same against another torch, in a copy of this tree under build/;
# PYTHON=python3.10 by another Python.
PYTHON ?= python3
pyver = $(shell $(1) -c 'import sys; print("3.10" if sys.version_info < (3, 11) else "3.11")')
PYVER := $(call pyver,$(or $(SYSTEM_PYTHON),$(PYTHON)))
# The newest torch that there is for this Python.
DEFAULT_TORCH ?= $(if $(filter 3.10,$(PYVER)),2.14.1,2.15.0)
TORCH ?= $(DEFAULT_TORCH)
VENV := $(if $(SYSTEM_PYTHON),.venv-over-system,.venv)
BIN := $(VENV)/bin
CONSTRAINTS := constraints/python-$(PYVER).txt $(wildcard constraints/torch-$(TORCH).txt)
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.map')
CXX_FILES := $(shell find csrc tests -name '*.cc' -o -name '*.cpp' -o -name '*.h')
PYTEST_ARGS ?=
# Set to anything it makes each of the many processes that tests start compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup run test test-rdma test-gpu bench-gpu lint format asan tsan bench evaluation clean \
  apt apt-lab

ifneq ($(TORCH),$(DEFAULT_TORCH))
# An extension fits one torch only, and is built in the tree: hence a tree for each torch.
COPY := build/torch-$(TORCH)$(if $(filter 3.10,$(PYVER)),-python3.10)
setup run test test-rdma test-gpu bench-gpu lint bench evaluation:
	mkdir -p $(COPY)
	git ls-files -zco --exclude-standard | tar -cf - --null -T - | tar -xf - -C $(COPY)
	$(MAKE) -C $(COPY) $@ DEFAULT_TORCH=$(TORCH)
else

ifneq ($(wildcard $(BIN)/python),)
ifneq ($(call pyver,$(BIN)/python),$(PYVER))
$(error $(VENV) is of Python $(call pyver,$(BIN)/python): name that with PYTHON=, or take another clone)
endif
endif

ifdef SYSTEM_PYTHON
# Over a Python that has torch; nothing is fetched, what is missing comes from the folder WHEELS.
# Its ninja makes the build parallel.
export PATH := $(PATH):$(shell $(SYSTEM_PYTHON) -c 'import os, sys; print(os.path.dirname(sys.executable))')
setup: $(VENV)/.built

$(VENV)/.installed: tools/system_venv.sh
	sh tools/system_venv.sh $(SYSTEM_PYTHON) $(VENV) $(WHEELS)
	touch $@
else
setup: apt $(VENV)/.built

$(VENV)/.installed: requirements.txt $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  $(addprefix -c ,$(CONSTRAINTS)) torch==$(TORCH) -r requirements.txt
	touch $@
endif

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	touch $@

# System packages that make more of the tests run; what stays missing is said, and tests skip with it.
apt:
	@sh tools/apt.sh

apt-lab:
	@sh tools/apt.sh lab

run: setup
	$(BIN)/python -m examples.demo $(RUN_ARGS)

# What test_cpp.py runs is compiled in what the other tests leave of the processors.
BESIDE := for s in asan tsan; do nice -n 19 sh tests/cpp/run.sh $$s build; done >/dev/null 2>&1 &
test: apt-lab setup lint
	$(if $(PYTEST_ARGS),,$(BESIDE)) \
	$(BIN)/python -m pytest $(PYTEST_ARGS); passed=$$?; wait; exit $$passed

# The Soft-RoCE lab alone, with more changes of a live queue pair than `make test` has time for.
test-rdma: export RDMA_CHANGES ?= 1000
test-rdma: apt-lab setup
	$(BIN)/python -m pytest tests/rdma $(PYTEST_ARGS)

# On one GPU with NCCL; fails where there is none. `make test` runs the same tests on fakes.
test-gpu: export CRUX_TEST_GPU := 1
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu --durations=20 $(PYTEST_ARGS)

bench-gpu: setup
	$(BIN)/python benchmarks/gpu_overhead.py --json benchmarks/results/gpu_overhead.json \
	  --text benchmarks/results/gpu_overhead.txt $(BENCH_ARGS)

lint: $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
ifeq ($(PYVER),3.10)
	@echo "mypy: not run; what numpy and scipy say of their types for Python 3.10 is older and wider"
else
	$(BIN)/mypy
endif
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

asan tsan:
	sh tests/cpp/run.sh $@

bench: setup
	$(BIN)/python benchmarks/overhead.py

# The paper's evaluation in the simulator, and beyond; DATA is a folder with traces (docs/trace.md).
RESULTS ?= out/results
evaluation: setup
	$(BIN)/python benchmarks/optimality.py --seed 10000 --threads 2 --out $(RESULTS)
	$(BIN)/python benchmarks/testbed.py --schedulers all --out $(RESULTS)
	$(BIN)/python benchmarks/testbed.py --sensitivity --draws 50 --horizon 60 --out $(RESULTS)
	$(BIN)/python benchmarks/trace.py $(if $(DATA),--data $(DATA)) --placement hived,muri \
	  --schedulers $(TRACED) --threads 2 --out $(RESULTS)
	$(BIN)/python benchmarks/trace.py $(if $(DATA),--data $(DATA)) --jobs 500 --threads 2 \
	  --topology clos,double-sided,non-blocking --schedulers $(TRACED),crux-fair --max-slowdown 2 \
	  --name trace_random --out $(RESULTS)
	$(BIN)/python benchmarks/trace.py $(if $(DATA),--data $(DATA)) --jobs 500 --threads 2 \
	  --topology clos,double-sided --schedulers crux --levels 1 --name trace_one_level --out $(RESULTS)
	$(BIN)/python benchmarks/torus.py --seeds 4 --out $(RESULTS)
	$(BIN)/python benchmarks/beyond.py --small 50 --testbed 4 --out $(RESULTS)
	$(BIN)/python benchmarks/decision.py --out $(RESULTS)
	$(BIN)/python benchmarks/sim_speed.py --out $(RESULTS)
	$(BIN)/crux sim figures $(RESULTS) --out $(RESULTS)/figures
TRACED := ecmp,sincronia,varys,taccl,cassini,crux-pa,crux-ps-pa,crux,ideal

endif

clean:
	rm -rf build dist out *.egg-info crux_torch/*.so
