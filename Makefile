# Two commands do everything: `make run` (set up, then the demo) and `make test` (set up, lint, tests).
# CONTRIBUTING.md describes the other tiers of tests: test-quick, test-all, coverage.
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
# Each file with its hash; for a release of torch that has no lock the versions alone are pinned.
LOCK := $(wildcard constraints/lock-python-$(PYVER)-torch-$(TORCH).txt)
CONSTRAINTS := constraints/python-$(PYVER).txt $(wildcard constraints/torch-$(TORCH).txt)
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.map')
CXX_FILES := $(shell find csrc tests -name '*.cc' -o -name '*.cpp' -o -name '*.h')
# One more worker than there are processors: many tests wait for something.
WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
PYTEST_ARGS ?=
# The files that have tests of the full tier, and properties: to import all others takes longer than
# to look into them. tests/project/test_tiers.py checks that none is missing.
with = $(shell grep -lrE --include='test_*.py' '$(1)' tests evaluation/tests)
FULL_FILES = $(call with,mark\.full) tests/gpu tests/rdma
ALONE_FILES = $(call with,mark\.alone)
PROPERTY_FILES = $(call with,hypothesis)
# Set to anything it makes each of the many processes that tests start compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup sdist wheels release run test test-quick test-all test-oldest-python soak recipes test-rdma test-gpu rig \
  coverage mutation bench-gpu lock licences audit lint format asan tsan compile-alone fuzz bench contest evaluation docs clean apt apt-lab

ifneq ($(TORCH),$(DEFAULT_TORCH))
# An extension fits one torch only, and is built in the tree: hence a tree for each torch.
COPY := build/torch-$(TORCH)$(if $(filter 3.10,$(PYVER)),-python3.10)
setup run test test-quick test-all test-rdma test-gpu coverage bench-gpu lint bench contest evaluation:
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

PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
$(VENV)/.installed: requirements.txt $(CONSTRAINTS) $(LOCK) constraints/lock-pip.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes -r constraints/lock-pip.txt
ifdef LOCK
	$(PIP_INSTALL) --require-hashes -r $(LOCK)
else
	@echo "torch $(TORCH) has no lock file: versions are pinned, hashes are not checked"
	$(PIP_INSTALL) $(addprefix -c ,$(CONSTRAINTS)) torch==$(TORCH) -r requirements.txt
endif
	touch $@
endif

$(VENV)/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-build-isolation --no-deps -e .
	touch $@

# System packages that make more of the tests run; what stays missing is said, and tests skip with it.
# NO_APT=1 installs none.
apt:
	@sh tools/apt.sh

apt-lab:
	@sh tools/apt.sh lab

run: setup
	$(BIN)/python -m lab $(RUN_ARGS)

# What finds most bugs for its time. PYTEST_ARGS="FILE -k NAME" runs a part, long tests included.
test: setup
	$(MAKE) --no-print-directory -j2 lint rig
	$(PYTEST) $(or $(PYTEST_ARGS),-m "not full")

# PyTorch's CUDA build without a GPU (docs/research/without-gpu.md), so that no test waits for a compiler.
rig: $(VENV)/.built
	cd tests && ../$(BIN)/python -c 'import cuda_rig; cuda_rig.ahead()'

# For the inner loop: no root, no set-up, nothing that starts jobs.
test-quick: $(VENV)/.built
	$(PYTEST) -q -m "not slow and not full" $(PYTEST_ARGS)

# What `make test` leaves out: sanitizers, emulated RDMA, long jobs; and more examples for the
# properties. Each part runs even if one before fails.
test-all: apt-lab setup $(if $(SYSTEM_PYTHON)$(filter 3.10,$(PYVER)),,$(VENV)/.docs)
	failed=0; \
	$(MAKE) --no-print-directory test-oldest-python || failed=1; \
	$(PYTEST) -m "full and not alone" --timeout 1200 --durations=25 $(FULL_FILES) || failed=1; \
	$(BIN)/python -m pytest -m "full and alone" --timeout 1200 --durations=25 $(ALONE_FILES) || failed=1; \
	HYPOTHESIS_PROFILE=long $(PYTEST) -m "hypothesis and not slow and not full" $(PROPERTY_FILES) || failed=1; \
	exit $$failed

# What needs no torch, on the oldest Python that is supported, where there is one.
test-oldest-python:
	sh tools/oldest_python.sh $(WORKERS)

# Faults drawn from a seed, under real jobs and an etcd of three members, for as long as you like.
# Then those in handovers, more of them than `make test-all` draws.
MINUTES ?= 60
SEED ?= 1
soak: apt-lab setup
	CRUX_SOAK_MINUTES=$(MINUTES) CRUX_SOAK_SEED=$(SEED) \
	CRUX_FAULT_RUNS=200 CRUX_FAULT_ROUNDS=2 CRUX_FAULT_SEED=$(SEED) \
	  $(BIN)/python -m pytest -s -m full tests/faults tests/backend/test_switch_faults.py

# Lines and branches that the tests of `make test` reach, by package; processes they start count.
coverage: setup
	rm -rf build/coverage
	mkdir -p build/coverage
	$(BIN)/coverage run -m $(subst $(BIN)/python -m ,,$(PYTEST)) $(or $(PYTEST_ARGS),-m "not full"); \
	passed=$$?; $(BIN)/coverage combine --quiet; $(BIN)/python tools/coverage_by_package.py; exit $$passed

# What needs Ray, which is too large for every run of the tests.
recipes: setup
	$(PIP_INSTALL) $(addprefix -c ,$(CONSTRAINTS)) -r requirements-recipes.txt
	$(BIN)/python -m pytest tests/launcher/test_ray.py tests/sim/test_workers.py -s $(PYTEST_ARGS)

# The Soft-RoCE lab alone.
test-rdma: apt-lab setup
	$(BIN)/python -m pytest tests/rdma $(PYTEST_ARGS)

# On one GPU with NCCL; fails where there is none. `make test-all` runs the same tests on the rig (docs/research/without-gpu.md).
test-gpu: export CRUX_TEST_GPU := 1
test-gpu: setup
	$(BIN)/python -m pytest tests/gpu --durations=20 $(PYTEST_ARGS)

bench-gpu: setup
	$(BIN)/python benchmarks/gpu_overhead.py --json benchmarks/results/gpu_overhead.json \
	  --text benchmarks/results/gpu_overhead.txt $(BENCH_ARGS)

# The hashes of the pinned versions; and the licences of all that is installed with them.
lock: $(VENV)/.installed
	sh tools/lock.sh $(BIN)/uv
licences: $(VENV)/.installed
	$(BIN)/uv tool run --quiet pip-licenses --python=$(BIN)/python --format=markdown --order=name --with-system \
	  --packages $$(sed -n 's/==.*//p' $(LOCK)) --output-file=constraints/LICENCES.md

# Known vulnerabilities of the pinned versions; it asks a service that some networks do not reach.
audit: $(VENV)/.installed
	$(BIN)/uv tool run --quiet pip-audit --disable-pip --require-hashes --strict --progress-spinner off -r $(LOCK)

lint: $(VENV)/.built
	$(BIN)/vermin --quiet --target=3.10- --violations --eval-annotations --no-tips \
	  crux_torch launcher evaluation lab benchmarks tests tools setup.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
ifeq ($(PYVER),3.10)
	@echo "mypy: not run; on Python 3.11 it checks for 3.10, with newer types of numpy and scipy"
else
	$(BIN)/mypy
endif
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CXX_FILES)

# One wheel for this Python and several releases of torch, tried in a new environment (docs/start/install.md).
TORCHES ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
sdist: $(VENV)/.installed
	$(BIN)/python -m uv --quiet build --sdist --out-dir dist
wheels: sdist
	$(BIN)/python tools/wheels.py dist/crux_torch-$$($(BIN)/python setup.py --version).tar.gz $(TORCHES)
# All that a release uploads, checked; it uploads nothing. TORCHES=--here tries this environment's torch alone.
release: $(VENV)/.installed
	$(BIN)/python tools/release_name.py $$(git tag --points-at HEAD --list 'v*')
	rm -f dist/crux_torch-*
	$(MAKE) --no-print-directory wheels
	$(BIN)/uv tool run --quiet twine==7.0.0 check --strict dist/crux_torch-*

# The documentation as a site, build/docs/index.html; what builds it needs Python 3.11.
DOCS_LOCK := constraints/lock-docs.txt
$(VENV)/.docs: $(VENV)/.built $(DOCS_LOCK)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(DOCS_LOCK)
	touch $@
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going -q -d build/docs-state . build/docs

asan tsan:
	sh tests/cpp/run.sh $@

# Each C++ file by itself; ALONE=transport those with that in their path.
compile-alone: $(VENV)/.built
	$(BIN)/python tools/compile_alone.py $(ALONE)

# Each fuzzer of the C++ for FUZZ_S seconds, with FUZZ_SEED; without one the time is it.
FUZZ_S ?= 60
fuzz:
	sh tests/cpp/run.sh fuzz $(FUZZ_S) $(FUZZ_SEED)

# Changes the code at random places, and counts for how many of the changes a test fails.
mutation: setup
	$(BIN)/python tools/mutation_sample.py $(MUTATION_ARGS)

bench: setup
	$(BIN)/python benchmarks/overhead.py

RESULTS ?= out/results
# All policies on the same real jobs in a network of namespaces (docs/research/contest.md); needs root.
contest: setup
	$(BIN)/python benchmarks/contest.py --out $(RESULTS) $(CONTEST_ARGS)

# The paper's evaluation in the simulator, and beyond; DATA is a folder with traces (docs/research/simulator.md).
evaluation: setup
	$(EVALUATE) optimality --seed 10000 --workers 2 --out $(RESULTS)
	$(EVALUATE) testbed --schedulers all --out $(RESULTS)
	$(EVALUATE) testbed --sensitivity --draws 50 --horizon 60 --out $(RESULTS)
	$(EVALUATE) trace $(if $(DATA),--data $(DATA)) --placement hived,muri \
	  --schedulers $(TRACED) --workers 2 --out $(RESULTS)
	$(EVALUATE) trace $(if $(DATA),--data $(DATA)) --jobs 500 --workers 2 \
	  --topology clos,double-sided,non-blocking --schedulers $(TRACED),crux \
	  --name trace_random --out $(RESULTS)
	$(EVALUATE) trace $(if $(DATA),--data $(DATA)) --jobs 500 --workers 2 \
	  --topology clos,double-sided --schedulers crux-paper --levels 1 --name trace_one_level --out $(RESULTS)
	$(EVALUATE) trace $(if $(DATA),--data $(DATA)) --jobs 120 --days 3 --workers 2 \
	  --topology clos,double-sided --schedulers ecmp,taccl,crux-paper,crux,ideal \
	  --name trace_default --out $(RESULTS)
	$(EVALUATE) torus --seeds 4 --out $(RESULTS)
	$(EVALUATE) saturated $(if $(DATA),--data $(DATA)) --workers 2 --out $(RESULTS)
	$(EVALUATE) saturated $(if $(DATA),--data $(DATA)) --networks clos --placements muri-shared --workers 2 \
	  --schedulers ecmp,taccl,crux-paper,crux,ideal --name saturated_shared --out $(RESULTS)
	$(EVALUATE) snapshots --out $(RESULTS)
	$(EVALUATE) precision --out $(RESULTS)
	$(EVALUATE) cassini --workers 2 --out $(RESULTS)
	$(EVALUATE) spraying --out $(RESULTS)
	$(EVALUATE) beyond --small 50 --testbed 4 --out $(RESULTS)
	$(EVALUATE) variants --out $(RESULTS)
	$(EVALUATE) dispatch --out $(RESULTS)
	$(EVALUATE) dispatch-contention --out $(RESULTS)
	$(BIN)/python benchmarks/decision.py --out $(RESULTS)
	$(BIN)/python benchmarks/sim_speed.py --out $(RESULTS)
	$(EVALUATE) figures $(RESULTS) --out $(RESULTS)/figures
EVALUATE := $(BIN)/python -m evaluation
TRACED := ecmp,sincronia,varys,taccl,cassini,crux-pa,crux-ps-pa,crux-paper,ideal

endif

clean:
	rm -rf build dist out *.egg-info crux_torch/*.so
