# Deployments: README.md beside this file. The Makefile of the root includes it. Tools and images are kept in .deploy,
# outside of the product's environment.
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
