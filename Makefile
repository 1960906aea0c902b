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

# Deployments: deploy/README.md. Tools and images are kept in .deploy, outside of the product's environment.
DEPLOY_TOOLS := .deploy/tools

.PHONY: check-deploy deploy-files image-lock image-smoke

.deploy/tools/.ready: deploy/tools.txt
	test -x $(DEPLOY_TOOLS)/bin/python || $(PYTHON) -m venv $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python -m pip install -q $(PIP_ARGS) -r deploy/tools.txt
	PATH="$(DEPLOY_TOOLS)/bin:$$PATH" command -v promtool || deploy/get_promtool.sh $(DEPLOY_TOOLS)/bin
	touch $@

check-deploy: setup .deploy/tools/.ready  ## Image, Compose, Kubernetes, Helm, dashboards: all that can be checked without a cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy

deploy-files: setup .deploy/tools/.ready  ## Make what lies in deploy/ by code: chart's schema, Kustomize base, dashboard
	$(BIN)/python deploy/chart_schema.py
	$(BIN)/python deploy/monitoring/dashboard.py
	$(DEPLOY_TOOLS)/bin/python deploy/render_chart.py --base deploy/kubernetes/base

# The versions are those that the tests run with; only torch is another build, and on a GPU Triton is what that asks for.
IMAGE_LOCK = $(DEPLOY_TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --upgrade \
	--no-header --no-annotate --extra otel --output-file deploy/image/requirements-$(1).txt pyproject.toml

image-lock: .deploy/tools/.ready  ## Choose the requirements of the images anew, after `make lock`
	UV_FIND_LINKS="$(TORCH_WHEELS)" $(call IMAGE_LOCK,cpu) -c requirements-cpu.txt -c requirements-torch-cpu.txt
	{ grep -o '^torch==[0-9.]*' requirements-torch-cpu.txt; sed '/^triton/,/[^\\]$$/d' requirements-cpu.txt; } \
		> .deploy/versions.txt
	$(call IMAGE_LOCK,cuda) -c .deploy/versions.txt

image-smoke: .deploy/tools/.ready  ## Build the CPU image and send a request through it (buildah)
	deploy/image/smoke.sh .deploy/images

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
