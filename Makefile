# `make` lists the targets. Every target prepares .venv once: the stamp files below depend on the lock
# files, so that a changed lock is installed and an unchanged one costs nothing.
# Written for GNU make 3.81 and later.

SCENARIO ?= $(if $(filter docker,$(LAUNCH)),containers,quickstart)
VENV := .venv
BIN := $(VENV)/bin
# Not compiled: Python compiles the modules that are really imported, which takes a fraction of the time. Without
# dependencies: the lock files name all of them.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-input --no-compile --no-deps
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
CREATED := $(VENV)/.created
PYTEST := $(BIN)/python -m pytest
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# Packages come without bytecode (see PIP). Where none may be written either, every process compiles PyTorch anew: 20 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup testbed image test lint bench bench-gate chaos fuzz phones clean

help: ## list the targets
	@echo "Cleave Testbed"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

setup: $(RUNTIME) ## prepare .venv (all other targets do it too)
	@echo "$(VENV) is ready: make testbed"

testbed: $(RUNTIME) ## run a scenario; DEVICES=4000 STEPS=10 SEED=1 MODEL=llama-tiny SCENARIO=quickstart LAUNCH=docker
	@$(BIN)/cleave run $(SCENARIO) $(if $(DEVICES),--devices $(DEVICES)) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(SEED),--seed $(SEED)) $(if $(MODEL),--set model.name=$(MODEL)) \
		$(if $(LAUNCH),--set launch.kind=$(LAUNCH))

image: $(RUNTIME) ## build the device image for LAUNCH=docker; BASE=debootstrap needs no registry
	@$(BIN)/cleave image $(if $(BASE),--base $(BASE))

# Lint, and what may run side by side, one process more than there are cores, since many tests wait for others; then, one
# after the other, what measures time. Both phases run whatever becomes of the first. 5: none of its tests was asked for.
test: $(DEV) ## lint and all tests; FAST=1 without slow, root, docker and alone ones; ARGS="-k name" goes to pytest
	@($(LINT)) > $(VENV)/lint.txt 2>&1 & lint=$$!; \
	$(PYTEST) -n $(or $(JOBS),$$(($$(getconf _NPROCESSORS_ONLN) + 1))) --dist loadfile --no-loadscope-reorder \
		$(if $(FAST),--fast,--phase beside) $(ARGS) || [ $$? -eq 5 ] || failed=yes; \
	wait $$lint || failed=yes; cat $(VENV)/lint.txt; \
	$(if $(FAST),,$(PYTEST) --phase alone $(ARGS) || [ $$? -eq 5 ] || failed=yes;) \
	[ -z "$$failed" ]

lint: $(DEV) ## run ruff and mypy --strict
	@$(LINT)

bench: $(RUNTIME) ## run the benchmarks; PEERS=1 also runs Ray and Dask; DOCS=1 writes the tables of docs/benchmarks.md
	@$(BIN)/python -m testbed.bench $(if $(PEERS),--peers) $(if $(ONLY),--only $(ONLY)) $(if $(DOCS),--write-docs)

bench-gate: $(RUNTIME) ## fail if a benchmark is 30% worse than its baseline; two minutes
	@$(BIN)/python -m testbed.bench gate

chaos: $(RUNTIME) ## run seeded faults on the real dispatcher and the server's loop, in virtual time; TIME_S=600 SEED=1
	@$(BIN)/python -m testbed.faults.chaos --seconds $(or $(TIME_S),60) --seed $(or $(SEED),0)

fuzz: $(RUNTIME) ## send nonsense to a real server, before and after admission; MESSAGES=1000000 SEED=1
	@$(BIN)/python -m testbed.faults.fuzz --messages $(or $(MESSAGES),200000) --seed $(or $(SEED),0)

phones: $(RUNTIME) ## deploy to every phone on adb; DRY=1 prints every adb command, PORT=5555 of the server
	@$(BIN)/cleave phones start $(if $(DRY),--dry-run) $(if $(PORT),--server-port $(PORT))

clean: ## remove .venv and caches; runs/ stays
	@rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find agent android ps emulator testbed tests netem_profiles -name __pycache__ -prune -exec rm -rf {} +

# PYTHON=... chooses the interpreter; otherwise the first one found that is new enough.
$(CREATED):
	@for python in $(if $(PYTHON),$(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Cleave Testbed needs Python 3.11 or newer, and none was found. Install one," >&2; \
		echo "or name it: make setup PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
		echo "$$found has no venv module. Install it (Debian, Ubuntu: apt install python3-venv)" >&2; \
		echo "or name another Python: make setup PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$("$$found" --version)"; \
	rm -rf $(VENV) && "$$found" -m venv $(VENV) && touch $@

$(RUNTIME): requirements.lock pyproject.toml | $(CREATED)
	@echo "Installing the run-time packages into $(VENV) (once; a minute or more, mostly PyTorch)"
	@$(PIP) -r requirements.lock
	@$(PIP) --no-build-isolation --editable .
	@touch $@

# Meanwhile the bytecode of PyTorch is made, which otherwise every process of the first tests would make for itself.
$(DEV): requirements-dev.lock $(RUNTIME)
	@echo "Installing the packages for tests and lint (once; under a minute)"
	@$(BIN)/python tests/helpers/warm.py & compiling=$$!; $(PIP) -r requirements-dev.lock && wait $$compiling
	@touch $@
