# Everything runs in .venv, which the first target to need it creates and later ones reuse.
PYTHON ?= python3
TORCH  ?= 2.13.0
OLDEST := 5.17.0
VENV   := .venv
BIN    := $(VENV)/bin
PAGE   := src/qklab/report/page
# Python compiles what is imported, once; compiling all that is installed takes a minute more.
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint bench evidence docs site clean help
help:
	@echo "make demo   every mechanism and its cost; three attentions compared on Python's own library; the report"
	@echo "make test   run the tests"
	@echo "make lint   ruff, pyright, import-linter, deno"
	@echo "make bench  measure the layer's mechanisms against the standard one, and the kernels against their bounds"
	@echo "make evidence  recompute every table and figure of the evidence from its records"
	@echo "make docs   redraw the drawings and cost tables of docs/mechanisms"
	@echo "make site   the documentation as a site, in build/site"

# torch is installed first and pinned: an open range may pull gigabytes of CUDA packages. One that is there is kept.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "qklab needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@if $(BIN)/python -c "import torch" 2>/dev/null; then \
		echo "== using torch $$($(BIN)/python -c 'import torch; print(torch.__version__)') already in $(VENV)"; \
	else echo "== installing torch $(TORCH) into $(VENV)"; $(PIP) torch==$(TORCH); fi
	@touch $@

$(VENV)/.qklab: $(VENV)/.torch pyproject.toml
	@echo "== installing qklab into $(VENV)"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.qklab pyproject.toml
	@echo "== installing the test and lint tools into $(VENV)"
	@$(PIP) 'qklab[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.qklab pyproject.toml
	@echo "== installing the site's tools into $(VENV)"
	@$(PIP) 'qklab[docs]'
	@touch $@

# What goes with the oldest Transformers lies in a folder of its own, before everything else on the path.
$(VENV)/.oldest: $(VENV)/.dev
	@echo "== installing Transformers $(OLDEST), the oldest supported, into $(VENV)/oldest"
	@$(PIP) --no-deps --upgrade --target $(VENV)/oldest \
		transformers==$(OLDEST) 'huggingface_hub<2' httpx httpcore h11 anyio
	@touch $@

demo: $(VENV)/.qklab
	@echo "== qklab mechanisms: every mechanism, its cost and its cache"
	@$(BIN)/qklab mechanisms
	@echo "== qklab compare: standard, affine coupling or (Q,K=V) on the text of Python's own library?"
	@$(BIN)/qklab compare --arms affine k=v
	@echo "== qklab sample: what the standard arm writes, through its key/value cache"
	@$(BIN)/qklab sample comparisons/stdlib/runs/stdlib/standard/lr0.003-seed0 "    def __init__(self" --tokens 60 --seed 0

test: $(VENV)/.oldest
	@echo "== running the tests"
	@$(BIN)/python -m pytest -q -n auto $(PYTEST_ARGS)
ifeq ($(PYTEST_ARGS),)
	@echo "== running those of Transformers with $(OLDEST), the oldest supported"
	@PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -q -n auto -m 'not newest' tests/hf --ignore=tests/hf/test_evaluate.py
endif

lint: $(VENV)/.dev
	@echo "== ruff"; $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== pyright"; PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --warnings
	@echo "== import-linter"; $(BIN)/lint-imports
	@echo "== deno, for the scripts of the report's page"
	@$(BIN)/deno fmt --quiet --check --line-width 120 $(PAGE)/*.js && $(BIN)/deno lint --quiet $(PAGE)

bench: $(VENV)/.qklab
	@echo "== measuring attention layers on this machine"
	@$(BIN)/python benchmarks/layer.py $(BENCH_ARGS)
	@echo "== the bounds of the kernels, which take a GPU"
	@$(BIN)/python benchmarks/bounds.py

evidence: $(VENV)/.docs
	@echo "== what becomes of the published claims, from the records of every run"
	@$(BIN)/python evidence/build.py
	@$(BIN)/python docs/build.py

docs: $(VENV)/.docs
	@echo "== redrawing docs"
	@$(BIN)/python docs/build.py

site: $(VENV)/.docs
	@echo "== building the site"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python tools/site.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
