# The one way to run everything. What has a value by ?= may be given: make demo PYTHON=python3.12
PYTHON ?= python3
VENV ?= .venv
# A machine without an NVIDIA driver gets the versions of requirements-*.txt, each checked by its hash. Elsewhere, or where
# TORCH is given (torch==2.14.1), pip chooses within what pyproject.toml allows, and brings CUDA.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo torch)
# Where the CPU build of torch lies: a folder or a page of links.
TORCH_WHEELS ?= $(or $(PIP_FIND_LINKS),https://download.pytorch.org/whl/cpu/torch/)
PIP_ARGS ?=
PIP = $(BIN)/python -m pip install -q $(PIP_ARGS)
LOCKED = --no-deps --require-hashes
BIN := $(VENV)/bin

.PHONY: help setup lock demo check test test-long simulate fuzz schemas chaos docs docs-check mutants test-clients first-hour test-real test-vllm lint format protos check-protos evaluate bench-stack clean

help:  ## List the commands
	@grep -hE "^[a-z-]+:.*##" $(MAKEFILE_LIST) | sed -E "s/:.*## /\t/" | expand -t 16

setup: $(VENV)/.ready  ## Virtual environment and dependencies

$(VENV)/.ready: pyproject.toml requirements-cpu.txt requirements-torch-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(strip $(TORCH)),)
	$(PIP) $(LOCKED) --find-links $(TORCH_WHEELS) -r requirements-torch-cpu.txt
	$(PIP) $(LOCKED) -r requirements-cpu.txt
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) "$(TORCH)"
	$(PIP) -e ".[dev,lab]"
endif
	touch $@

BUILT_BY = printf "setuptools>=77\nsetuptools-scm>=9\n"  # build-system of pyproject.toml

lock: setup  ## Choose the versions of requirements-cpu.txt anew, within what pyproject.toml allows
	$(BUILT_BY) | UV_FIND_LINKS="$(TORCH_WHEELS)" $(BIN)/uv pip compile --quiet --upgrade --universal \
		--python-version 3.11 --fork-strategy fewest --generate-hashes --no-header --no-annotate \
		--extra dev --extra lab --extra otel --no-emit-package torch --constraint requirements-torch-cpu.txt \
		--output-file requirements-cpu.txt pyproject.toml -

demo: setup  ## Launch the bundled pair and continue a text
	$(BIN)/python -m specahead.cli.demo

test: setup lint check-protos  ## Lint, types, stubs, and all tests but those that take long
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" tests/e2e
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" tests/simulation tests/unit tests/test_models.py

test-long: setup  ## What takes long: a cluster that grows and shrinks, loses a node or its head; benchmarks' smallest runs
	$(BIN)/python -m pytest -m long tests/e2e tests/unit tests/test_models.py

check: lint  ## Lint, types, and the unit tests of daily work: four minutes at most on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow and not long" tests/unit

# Environments of real clients, each with what its file in tests/clients/environments names. openai's own client, which is
# light, is in CI as well: tests/unit and tests/e2e ask by it.
CLIENTS ?= openai3 openai2 anthropic examples aiperf tools

test-clients: setup $(CLIENTS:%=.venv-clients/%/.ready)  ## Real clients (openai, anthropic, litellm, lm-eval, …), unmodified, against a launch
	$(BIN)/python -m tests.clients .venv-clients $(CLIENTS)

.venv-clients/%/.ready: tests/clients/environments/%.txt tests/clients/environments/pytest.txt
	$(PYTHON) -m venv .venv-clients/$*
	$(if $(filter tools,$*),.venv-clients/$*/bin/python -m pip install -q $(PIP_ARGS) "$(TORCH)")
	.venv-clients/$*/bin/python -m pip install -q $(PIP_ARGS) -r $<
	touch $@

first-hour:  ## What a new user does first, in a fresh folder, and how long it takes: five minutes at most
	$(PYTHON) -m tests.first_hour --torch="$(TORCH)" --pip-args="$(PIP_ARGS) $(if $(TORCH),,--find-links $(TORCH_WHEELS))"

FLAGS ?=

test-real: setup  ## What agents ask of a real model, and its tokens beside transformers': TARGET=… DRAFT=… FLAGS="…"
	$(BIN)/python -m pytest tests/real --target "$(TARGET)" --draft "$(DRAFT)" --flags "$(FLAGS)"

test-vllm: setup  ## vLLM's own tests of its OpenAI endpoints, from its sources: VLLM=path
	VLLM="$(VLLM)" $(BIN)/python -m tests.vllm_openai
N ?= 100000
JOBS ?= 2

fuzz: setup  ## Give N strangers' inputs to all code that reads bytes of others
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --inputs $(N) --jobs $(JOBS)

schemas: setup  ## Follow a thousand random schemas to the end, with two seeds each
	SCHEMAS=1000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 3600 tests/unit/test_random_schemas.py

MINUTES ?= 10

chaos: setup  ## Kill and stop real services under traffic for MINUTES=N: no client may get a wrong token
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos --minutes $(MINUTES)

# Nothing of the site is loaded from elsewhere, so that it can be built and read without a network.
docs: .venv-docs/.ready  ## The documents as a site, in .site/index.html
	.venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: docs/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q $(PIP_ARGS) -r docs/requirements.txt
	touch $@

docs-check: setup  ## Find what the documents name and is no more: files, tests, commands, flags, metrics
	$(BIN)/python -m pytest tests/unit/test_docs.py

MODULE ?= orchestrator/cluster/autoscaling.py
TESTS ?= tests/unit/test_autoscaling.py

mutants: setup  ## Change MODULE in one place at a time (cosmic-ray): which changes do TESTS not notice?
	$(PIP) "cosmic-ray>=8.4"
	tests/mutants.sh $(BIN)/python $(MODULE) "$(TESTS)"

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: setup  ## Let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Deployments: deploy/README.md. Tools and images are kept in .deploy, outside of the product's environment.
DEPLOY_TOOLS := .deploy/tools
DIST_TOOLS := .deploy/dist

.PHONY: check-deploy deploy-files dist sbom image-lock image-smoke

.deploy/tools/.ready: deploy/tools.txt
	test -x $(DEPLOY_TOOLS)/bin/python || $(PYTHON) -m venv $(DEPLOY_TOOLS)
	$(DEPLOY_TOOLS)/bin/python -m pip install -q $(PIP_ARGS) -r deploy/tools.txt
	PATH="$(DEPLOY_TOOLS)/bin:$$PATH" command -v promtool || deploy/get_promtool.sh $(DEPLOY_TOOLS)/bin
	touch $@

.deploy/dist/.ready: deploy/dist.txt
	test -x $(DIST_TOOLS)/bin/python || $(PYTHON) -m venv $(DIST_TOOLS)
	$(DIST_TOOLS)/bin/python -m pip install -q $(PIP_ARGS) -r deploy/dist.txt
	touch $@

dist: .deploy/dist/.ready  ## Source archive and wheel in dist/, checked by twine; a tag of git is the version
	rm -rf dist
	$(DIST_TOOLS)/bin/python -m build --no-isolation --outdir dist .
	$(DIST_TOOLS)/bin/twine check --strict dist/*

SBOM = $(DIST_TOOLS)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible

sbom: .deploy/dist/.ready  ## What the locked product consists of (CycloneDX), on a CPU and with CUDA, in .deploy/
	$(SBOM) --output-file .deploy/sbom-cpu.cdx.json deploy/image/requirements-cpu.txt
	$(SBOM) --output-file .deploy/sbom-cuda.cdx.json deploy/image/requirements-cuda.txt

check-deploy: setup .deploy/tools/.ready .deploy/dist/.ready  ## Image, Compose, Kubernetes, Helm, dashboards: all that can be checked without a cluster
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/deploy

deploy-files: setup .deploy/tools/.ready  ## Make what lies in deploy/ by code: chart's schema, Kustomize base
	$(BIN)/python deploy/chart_schema.py
	$(DEPLOY_TOOLS)/bin/python deploy/render_chart.py --base deploy/kubernetes/base

# The versions are those that the tests run with; only torch is another build, and on a GPU Triton is what that asks for.
IMAGE_LOCK = $(BUILT_BY) | $(DEPLOY_TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--upgrade --no-header --no-annotate --extra otel --output-file deploy/image/requirements-$(1).txt pyproject.toml -

image-lock: .deploy/tools/.ready  ## Choose the requirements of the images anew, after `make lock`
	export UV_FIND_LINKS="$(TORCH_WHEELS)"; $(call IMAGE_LOCK,cpu) -c requirements-cpu.txt -c requirements-torch-cpu.txt
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
evaluate: setup  ## Fill docs/quality/tables.md from a folder of texts: BOOKS=…
	@test -n "$(BOOKS)" || { echo "make evaluate BOOKS=FOLDER, a folder of .txt files"; exit 2; }
	$(BIN)/python -m specahead.lab.evaluation.quality --books $(BOOKS)

SEEDS ?= 1000

simulate: setup  ## The control path on virtual time, under faults: SEEDS=…
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS)

bench-stack: setup  ## What a round costs without the models
	$(BIN)/specahead bench stack

clean:
	rm -rf $(VENV) .venv-3.* .venv-clients .venv-docs .site .pytest_cache .mypy_cache .ruff_cache .hypothesis
