# Two commands: `make train` and `make test`. Each sets up what it needs; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

RECIPE ?= dlrm_dcnv2
DATA ?=
FLAGS ?=

CORES := $(shell nproc)
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU')
DEVICE := $(if $(filter-out 0,$(GPUS)),gpu,cpu)
RANKS ?= $(if $(filter 1,$(GPUS)),1,2)
SOURCES := $(wildcard csrc/*.* csrc/cuda/*)

ifeq ($(origin PYTHON),command line)
# The caller's interpreter: nothing is installed or built unasked, and what is missing is named.
checked = $(PYTHON) torchembed/core/versions.py --missing $(1)
READY :=
else
PYTHON := .venv/bin/python
checked = true
READY := .venv/.installed
endif

# Tests of one file share what is costly to make, so they stay in one process; the longest files
# come first (tests/support/schedule.py). There is one process more than processors, since ranks
# wait for each other, and other tests for disks and for programs to end. Modules are compiled once
# for all the processes that tests start, also where the environment would have each of them do so.
WORKERS = $$(( $(CORES) + 1 ))
run_tests = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(1) --dist loadfile \
  --no-loadscope-reorder --max-worker-restart 0
PYTEST = $(call run_tests,$(WORKERS))
# Whatever was built must also be what runs.
NATIVE_LANE = $(shell test ! -e torchembed/_C.abi3.so || echo TORCHEMBED_LANE=native)
# What lanes can tell of kernels: all but how the compilers of Triton and of torch take operations,
# which is alike for all kernels of one, and tested in the native lane.
INTERPRETED = -k 'not compile' tests/ops tests/triton_kernels tests/sharding/test_push.py
REFERENCE = -k 'not compile' tests/ops

.PHONY: help
help: ## Print this list
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@printf '%s\n' '' \
	  'RECIPE=<name>      which recipe to train (now $(RECIPE))' \
	  'DATA=<path>        a folder or file of data; without it the recipe makes its own' \
	  'RANKS=<n>          processes to train with (now $(RANKS))' \
	  'FLAGS="--a b"      further flags of the recipe' \
	  'PYTHON=<python>    an interpreter that has what is needed: nothing is installed'

.PHONY: train
train: $(READY) ## Train RECIPE on RANKS processes
	@$(call checked,train)
	$(PYTHON) -m recipes.train_on_ranks "$(RANKS)" "$(RECIPE)" $(if $(DATA),--data "$(DATA)") $(FLAGS)

.PHONY: serve
serve: $(READY) ## Deploy the newest run of RECIPE, or one that it trains first, and serve it
	@$(call checked,serve)
	@test -z "$(DATA)" || { echo "DATA must be left out, got $(DATA): make train takes it" >&2; exit 2; }
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(CORES)} $(PYTHON) -m recipes.serve "$(RECIPE)" $(FLAGS)

# The shorter lanes run side by side on as many processes in all, each of which takes seconds to
# begin. Which of them fails is known once both have ended.
.PHONY: test
test: $(READY) ## Run the CPU suite in each of its lanes
	@$(call checked,test)
	$(strip $(NATIVE_LANE) $(PYTEST))
	@mkdir -p build
	TORCHEMBED_FORCE_REFERENCE=1 TORCHEMBED_LANE=reference $(call run_tests,1) $(REFERENCE) \
	  >build/reference.txt 2>&1 & reference=$$!; passed=true; \
	TRITON_INTERPRET=1 TORCHEMBED_LANE=triton $(call run_tests,$(CORES)) $(INTERPRETED) || passed=false; \
	wait $$reference || passed=false; cat build/reference.txt; $$passed

# The interpreter is not instrumented, so AddressSanitizer is loaded before it; and, beside it, the
# C++ runtime, for AddressSanitizer to find what throws exceptions.
SANITIZED = build/sanitize
SANITIZERS = $(foreach name,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(name)))

.PHONY: sanitize
sanitize: $(READY) ## Test operations on a C++ library that checks its accesses to memory (by GCC)
	@$(call checked,test)
	TORCHEMBED_SANITIZE=1 CXX="$(CXX)" $(PYTHON) setup.py --quiet build_ext \
	  --build-lib $(SANITIZED) --build-temp $(SANITIZED)/objects
	LD_PRELOAD="$(SANITIZERS)" TORCHEMBED_LIBRARY=$(CURDIR)/$(SANITIZED)/torchembed/_C.abi3.so \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1 \
	TORCHEMBED_LANE=native $(PYTEST) tests/ops

.PHONY: lint
lint: .venv/.installed ## Run the linters and the type checker
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/clang-format --dry-run --Werror $(SOURCES)
	.venv/bin/lint-imports
	.venv/bin/pyright

.PHONY: format
format: .venv/.installed ## Format Python and C++, and fix what the linter can fix
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	.venv/bin/clang-format -i $(SOURCES)

.PHONY: docs
docs: .venv/.installed ## Build the site of docs/ into build/site
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --config-file docs/site/mkdocs.yml
	@echo 'Open build/site/index.html'

.PHONY: native
native: $(READY) ## Build the C++ library in place
	@$(call checked,native)
	$(PYTHON) setup.py --quiet build_ext --inplace

# The environment in four steps, of which `make -j` takes the two in the middle side by side. Modules
# are compiled when they are first imported: most never are.
EXTRAS = recipes mlperf serving export docs test bench dev
PIP = .venv/bin/pip install -qq --no-compile
LIST_REQUIREMENTS = import sys, tomllib; \
  project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]; \
  print(*sum(extras, project["dependencies"]), sep="\n")

# An old pip, as that of Python 3.11, takes two minutes more to choose versions.
.venv/.torch: torchembed/core/versions.py
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "torchembed needs Python 3.11 or later")'
	@echo 'Setting up .venv: a few minutes, once'
	python3 -m venv .venv
	$(PIP) --upgrade 'pip>=25'
	python3 torchembed/core/versions.py --requirements $(DEVICE) > .venv/pins.txt
	$(PIP) -r .venv/pins.txt
	touch $@

.venv/.packages: .venv/.torch pyproject.toml
	@python3 -c '$(LIST_REQUIREMENTS)' $(EXTRAS) > .venv/requirements.txt
	$(PIP) -c .venv/pins.txt -r .venv/requirements.txt
	$(PIP) --no-deps $$(python3 torchembed/core/versions.py --requirements-without-dependencies)
	touch $@

# Kernels for GPUs take most of the build's time, and nothing runs them without one;
# tests/packaging/test_distributions.py compiles them all the same.
.venv/.native: .venv/.torch setup.py $(SOURCES)
	TORCHEMBED_WITHOUT_CUDA=$(if $(filter cpu,$(DEVICE)),1,0) \
	  .venv/bin/python setup.py --quiet build_ext --inplace
	touch $@

.venv/.installed: .venv/.packages .venv/.native
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

.PHONY: clean
clean: ## Remove the environment and all that was built
	rm -rf .venv build dist *.egg-info torchembed/_C.abi3.so
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
