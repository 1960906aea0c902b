# The one way to run everything. PYTHON, TORCH and PIP_ARGS may be given: make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
# A machine without an NVIDIA driver gets this CPU release; elsewhere pip's own choice brings CUDA.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch || echo torch==2.13.0)
PIP_ARGS ?=
BIN := $(VENV)/bin

.PHONY: help setup demo check test lint format protos check-protos evaluate bench-stack clean

help:  ## List the commands
	@grep -hE "^[a-z-]+:.*##" $(MAKEFILE_LIST) | sed -E "s/:.*## /\t/" | expand -t 16

setup: $(VENV)/.ready  ## Virtual environment and dependencies

$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install -q $(PIP_ARGS) -e ".[dev]"
	touch $@

demo: setup  ## Launch the bundled pair and continue a text
	$(BIN)/python -m orchestrator.demo

test: setup lint check-protos  ## Lint, types, stubs, and all tests
	$(BIN)/python -m pytest tests/e2e
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/test_models.py

check: lint  ## Lint, types, and the unit tests of daily work: four minutes at most on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" tests/unit

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## Let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

include deploy/deploy.mk

PROTOC = $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) protos/*.proto

protos: setup  ## Regenerate the gRPC stubs
	$(call PROTOC,.)

check-protos: setup  ## Fail if the committed stubs differ from what the .proto files give
	@fresh=$$(mktemp -d) && $(call PROTOC,$$fresh) && \
	for file in $$fresh/protos/*; do cmp $$file protos/$$(basename $$file) || { echo "stale stubs: run make protos"; exit 1; }; done && \
	rm -r $$fresh


# Plain text files; those that the bundled plan was calibrated on are left out.
BOOKS ?= ../shared/corpus

evaluate: setup  ## Reproduce docs/quality.md from a folder of texts: BOOKS=…
	$(BIN)/python -m evaluation.quality --books $(BOOKS)

bench-stack: setup  ## What a round costs without the models
	$(BIN)/specahead bench stack

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
