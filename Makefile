# Everything a person or CI does with a checkout.  Each environment lies inside it and is rebuilt when what it is made from changes.
PYTHON ?=
JOBS ?= 2
PYTEST ?=
export PYTHON

# Caches stay inside the checkout too.
export XDG_CACHE_HOME := $(CURDIR)/.cache
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export CUDA_CACHE_PATH := $(CURDIR)/.cache/nv
export TRITON_HOME := $(CURDIR)/.cache
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
export HF_HOME := $(CURDIR)/.cache/huggingface
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start many processes: each would compile all of Python's modules anew.
unexport PYTHONDONTWRITEBYTECODE

MADE_FROM := pyproject.toml constraints/cpu.txt scripts/environment.py scripts/find-python

.DEFAULT_GOAL := help
.PHONY: help demo test reports lint format types clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' Makefile | expand -t 10

demo: .venv-demo/stamp ## embed real sentences, attention by tilefold, compared with PyTorch
	@.venv-demo/bin/tilefold demo

.PHONY: demo-video
demo-video: .venv-demo/stamp ## render a video, attend it by each sparse policy, draw what one query attends
	@.venv-demo/bin/tilefold video demo

test: .venv-test/stamp .cache/newest-triton ## run the tests (JOBS=2 processes; PYTEST="-k name" adds options)
	@.venv-test/bin/python -m pytest -n auto --maxprocesses $(JOBS) --dist loadgroup $(PYTEST)

# Limits hold whatever sums torch's and MKL's kernels choose: a few tests under one other choice, another one every day.
CHOICES := default,COMPATIBLE,1 avx2,AVX2,8 default,AVX2,2 avx2,COMPATIBLE,1 default,COMPATIBLE,2 avx2,AVX2,1
CHOICE ?= $(shell set -- $(CHOICES); shift $$(( $$(date +%s) / 86400 % $$# )); echo $$1)
.PHONY: rounding
rounding: .venv-test/stamp ## tests of rounding under another choice of kernels (CHOICE=ATen's,MKL's,threads; one of the day's)
	@echo '$(CHOICE)' | { IFS=, read -r aten mkl threads; \
	export ATEN_CPU_CAPABILITY=$$aten MKL_CBWR=$$mkl OMP_NUM_THREADS=$$threads; \
	echo "rounding: ATEN_CPU_CAPABILITY=$$aten MKL_CBWR=$$mkl OMP_NUM_THREADS=$$threads"; \
	.venv-test/bin/python -m pytest -q tests/cpu/core/test_planted_faults.py tests/cpu/backward/test_attention_backward_options.py \
	tests/cpu/sparse/test_coarse.py -k "plain_pytorch or test_mods or dead_blocks" $(PYTEST); }

GPU_PYTHON ?= python3
TEST_GPU ?=
.PHONY: test-gpu
test-gpu: ## tests/gpu on a GPU, in pieces under ten minutes: call it until nothing is left (GPU_PYTHON=python3; TEST_GPU="--record FILE")
	@PYTHONPATH=src:tests $(GPU_PYTHON) -m gpu_run $(TEST_GPU)

VLLM ?= 0.33.0
.PHONY: test-vllm
test-vllm: .venv-test/stamp ## the backend beside the sources of vLLM VLLM, whose wheel (0.4 GB) is fetched and not installed
	@mkdir -p .cache/vllm && cd .cache/vllm && { [ -d $(VLLM)/vllm ] || \
	  { ../../.venv-test/bin/python -m pip download -q --no-deps -d $(VLLM) vllm==$(VLLM) && cd $(VLLM) && \
	    ../../../.venv-test/bin/python -m zipfile -e vllm-*.whl . && rm vllm-*.whl; }; }
	@PYTHONPATH=src:tests .venv-test/bin/python tests/vllm_contract.py .cache/vllm/$(VLLM)

SMOKE ?= --constraints constraints/cpu.txt
.PHONY: smoke
smoke: ## install the wheel into an empty environment and try it (SMOKE='--with "torch==2.13.0"' for another set than the constraints')
	@python=$$(sh scripts/find-python) && "$$python" scripts/smoke.py $(SMOKE)

.PHONY: dist
dist: .venv-release/stamp ## the last commit's wheel and source archive, built twice and compared, checked, listed, into dist/; then tried (SMOKE as above)
	@.venv-release/bin/python scripts/dist.py
	@$(MAKE) --no-print-directory dist-smoke

.PHONY: dist-smoke
dist-smoke: ## try the wheel in dist/: the README's first example, the first three tutorials, doctor, check
	@python=$$(sh scripts/find-python) && "$$python" scripts/smoke.py $(SMOKE) --wheel dist/tilefold-*.whl --pages first_call masks training

API ?=
.PHONY: api
api: .venv-test/stamp ## what changed in the public API since it was listed in tests/public_api.txt (API=--write lists it anew)
	@.venv-test/bin/python scripts/docs/public_api.py $(API)

SECONDS ?= 60
.PHONY: sweep
sweep: .venv-test/stamp ## random problems of every operation against fp64 (SECONDS=60, JOBS=2 processes; SWEEP="--seed 3" adds options)
	@PYTHONPATH=tests .venv-test/bin/python -m sweep --seconds $(SECONDS) --jobs $(JOBS) $(SWEEP)

reports: .venv-test/stamp .cache/newest-triton ## compile the tests' kernels anew and keep what came out in the repository
	@rm -rf .cache/aot
	@TILEFOLD_AOT_REPORTS=ignore .venv-test/bin/python -m pytest -n auto --maxprocesses $(JOBS) --dist loadgroup tests/cpu/aot $(PYTEST)
	@.venv-test/bin/python tests/aot_kept.py

lint: .venv-test/stamp ## check style and formatting
	@.venv-test/bin/ruff check .
	@.venv-test/bin/ruff format --check .

format: .venv-test/stamp ## rewrite files in the project's style
	@.venv-test/bin/ruff format .
	@.venv-test/bin/ruff check --fix .
	@.venv-test/bin/ruff format .

types: .venv-test/stamp ## check types (strict outside the kernels)
	@.venv-test/bin/mypy

.PHONY: docs
docs: .venv-test/stamp ## build the documentation's site into out/site, every warning an error
	@NO_MKDOCS_2_WARNING=1 .venv-test/bin/python -m mkdocs build --strict --quiet --site-dir out/site
	@echo "docs: out/site/index.html (the search needs a server: python3 -m http.server -d out/site)"

SITE_CHECK ?=
.PHONY: site-check
site-check: .venv-release/stamp ## look at the built site in Chromium: accessibility, narrow screens, dark mode (SITE_CHECK="--all --shots out/shots")
	@.venv-release/bin/python scripts/docs/site_check.py $(SITE_CHECK)

.PHONY: pictures
pictures: .venv-test/stamp ## draw docs/assets anew: the charts of speed from benchmarks/results, the fold, maps of blocks
	@.venv-test/bin/python scripts/docs/pictures.py

clean: ## remove environments, caches and build outputs
	rm -rf .venv-demo .venv-test .venv-release .cache .pytest_cache .ruff_cache .mypy_cache .hypothesis dist build out
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-demo/stamp: $(MADE_FROM)
	@python=$$(sh scripts/find-python) && "$$python" scripts/environment.py .venv-demo demo
	@touch $@

.venv-test/stamp: $(MADE_FROM)
	@python=$$(sh scripts/find-python) && "$$python" scripts/environment.py .venv-test dev
	@touch $@

# For the site a browser's driver, for a release what builds and checks it.
.venv-release/stamp: constraints/release.txt scripts/find-python
	@python=$$(sh scripts/find-python) && "$$python" -m venv .venv-release
	@.venv-release/bin/python -m pip install --quiet --progress-bar off -r constraints/release.txt
	@.venv-release/bin/python -m pip install --quiet --progress-bar off --no-deps axe-playwright-python==0.1.8 # for axe-core alone
	@touch $@

# The newest Triton, to compile every kernel under it too.  Without a network its tests are skipped and say so.
.cache/newest-triton: scripts/fetch_triton.py .venv-test/stamp
	@mkdir -p .cache
	@.venv-test/bin/python scripts/fetch_triton.py --into .cache > $@.log 2>&1 && cp $@.log $@ || echo "no second Triton: $$(tail -n 1 $@.log)"
