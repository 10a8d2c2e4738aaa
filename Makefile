# Every task in one place; `make help` lists them.  Needs python3 >= 3.11, pip and make.

PYTHON ?= python3
PORT ?= 30000
DEMO ?= .demo
MARK ?= not gpu
WORKERS ?= 2
TEST_ARGS ?=
BENCH_ARGS ?=
PEERS ?=

BIN := .venv/bin
RESULTS := .test-results
SOURCES := tests scripts .ci $(wildcard benchmarks/*.py benchmarks/*/*.py examples/*.py)

.DEFAULT_GOAL := help
.PHONY: help venv serve test test-gpu check fix golden docs bench bench-peers clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: PYTHON=$(PYTHON) PORT=$(PORT) DEMO=$(DEMO) MARK='$(MARK)' WORKERS=$(WORKERS) TEST_ARGS='$(TEST_ARGS)'"
	@echo "           TORCH_INDEX=URL takes torch from that package index (a CPU build, for example)"

venv:  ## make or update .venv (does nothing when nothing has changed)
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "gtp-serve needs Python 3.11 or newer; '$(PYTHON)' is not installed. Try: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gtp-serve needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) scripts/make_venv.py

serve: venv  ## serve a real model from a Megatron GTP checkpoint on the CPU (PORT=30000)
	$(BIN)/gtp-serve demo $(DEMO)
	$(BIN)/gtp-serve --ckpt $(DEMO)/megatron --device cpu --port $(PORT)

test: venv check  ## all checks, then every test that needs no GPU
	@rm -rf $(RESULTS) && mkdir -p $(RESULTS)
	$(BIN)/python -m pytest -m "$(MARK)" -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20 --junitxml=$(RESULTS)/junit.xml $(TEST_ARGS)

test-gpu: venv  ## the tests that need a GPU
	$(BIN)/python -m pytest -m gpu --durations=10 $(TEST_ARGS)

check: venv  ## format, lint, import ladder, types, known advisories
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_advisories.py
	$(BIN)/mypy -p gtp_serve
	$(BIN)/mypy $(SOURCES)

fix: venv  ## format and repair what ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

golden: venv  ## rewrite tests/golden's recorded answers; look at the diff before you commit it
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest tests/golden tests/unit/test_cli.py tests/unit/test_startup.py tests/unit/test_server_parts.py tests/e2e/test_serve_process.py $(TEST_ARGS)

docs: venv  ## the documentation as a site in build/site, with every warning an error
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-docs.lock
	$(BIN)/python -m mkdocs build --strict

bench: venv $(DEMO)/hf  ## our speed beside the peers that are installed, 12 minutes (BENCH_ARGS=--quick: 4)
	$(BIN)/python benchmarks/measure.py --model $(DEMO)/hf $(BENCH_ARGS)

bench-peers: venv $(DEMO)/hf  ## install the peers of `make bench`, each into its own environment in build/peers
	$(BIN)/python benchmarks/make_peers.py --model $(DEMO)/hf $(PEERS)

$(DEMO)/hf: | venv
	$(BIN)/gtp-serve demo $(DEMO)

clean:  ## remove what the other tasks made, .venv and the demo model included
	rm -rf .venv $(DEMO) $(RESULTS) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
