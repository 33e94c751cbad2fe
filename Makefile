# Everything here needs Python >= 3.11 and make, nothing else; the rest goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Arguments for pytest, e.g. `make test ARGS="-k freeze -x"`.
ARGS ?=
# Processes that run test files side by side, each with servers of its own.
JOBS ?= 3
# How long `make chaos` breaks things, and the seed of a run to be repeated.
SECONDS ?= 600
SEED ?=

.DEFAULT_GOAL := help
.PHONY: help demo demo-job demo-load admin chaos test test-all debian lint format bench bench-quick matrix docs wheel requirements clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## Run both acts on real servers and workers, told as they happen (two minutes)
	$(BIN)/python -m example_project.demo

demo-job: $(VENV)/.demo ## The first act alone: the main job, and a worker that is frozen in it (a minute)
	$(BIN)/python -m example_project.demo --job

demo-load: $(VENV)/.demo ## The second act alone: charge 200 orders while workers and servers fail (a minute)
	$(BIN)/python -m example_project.load

admin: $(VENV)/.demo ## The first act, then leave it running with the admin at a printed address
	$(BIN)/python -m example_project.demo --admin

test: $(VENV)/.dev ## Run the tests that need nothing but the wheels
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not debian" $(ARGS)

test-all: debian $(VENV)/.dev ## Run all tests; installs Debian packages first if they are missing (as root)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: $(VENV)/.dev ## Break workers and servers at random, e.g. make chaos SECONDS=600 SEED=1
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) $(BIN)/python -m pytest tests/chaos -s $(ARGS)

lint: $(VENV)/.dev ## Check style, types, layers and migrations
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	# Without a database, Django cannot look whether the applied migrations are in order, and says so.
	DJANGO_SETTINGS_MODULE=example_project.settings $(BIN)/python -W error \
		-W "ignore:Got an error checking a consistent migration history:RuntimeWarning" \
		-m django makemigrations --check --dry-run

format: $(VENV)/.dev ## Format the code and repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench ## Measure what a guarded task costs beside bare tasks, peers and raw clients (a quarter of an hour)
	$(BIN)/python -m benchmarks --json build/bench.json --plot build/bench.svg $(ARGS)

bench-quick: $(VENV)/.bench ## The same with fewer rounds and smaller tables (two minutes)
	$(BIN)/python -m benchmarks --quick --json build/bench-quick.json --plot build/bench-quick.svg $(ARGS)

matrix: $(VENV)/.dev ## Run the tests for all supported versions of Python, Celery, Django and redis-py
	$(BIN)/nox

docs: $(VENV)/.dev ## Check that the links and code blocks of the documentation are right
	$(BIN)/python -m pytest tests/unit/test_docs.py $(ARGS)

wheel: $(VENV)/.dev ## Build the sdist and the wheel into dist/
	$(BIN)/python -m build --no-isolation

requirements: $(VENV)/.dev ## Compile requirements/*.txt anew, with the newest versions
	for name in demo dev bench; do (cd requirements && ../$(BIN)/python -m piptools compile --upgrade --generate-hashes \
		--strip-extras --allow-unsafe --no-annotate --no-header --no-emit-index-url --no-emit-trusted-host \
		--no-emit-find-links --output-file $$name.txt $$name.in) || exit 1; done

clean: ## Remove the virtual environment, caches and builds
	rm -rf $(VENV) .nox .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'This needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo 'This Python lacks venv and ensurepip. On Debian or Ubuntu: apt-get install python3-venv' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp is younger than what its packages were installed from.
$(VENV)/.demo: requirements/demo.txt pyproject.toml | $(BIN)/python
	$(PIP) install --require-hashes --requirement requirements/demo.txt
	$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/dev.txt $(VENV)/.demo
	$(PIP) install --require-hashes --requirement requirements/dev.txt
	@touch $@

$(VENV)/.bench: requirements/bench.txt $(VENV)/.demo
	$(PIP) install --require-hashes --requirement requirements/bench.txt
	@touch $@

DEBIAN := redis-server postgresql-15 rabbitmq-server pgbouncer chromium

debian:
	@missing=; for package in $(DEBIAN); do \
		dpkg-query --show --showformat='$${db:Status-Status}' $$package 2>/dev/null | grep -qx installed \
		|| missing="$$missing $$package"; done; \
	test -z "$$missing" && exit; \
	command -v apt-get >/dev/null || { echo "make test-all needs Debian with:$$missing" >&2; exit 1; }; \
	test "$$(id -u)" = 0 || { echo "make test-all needs these packages; install them as root:$$missing" >&2; exit 1; }; \
	apt-get update --quiet && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $$missing
