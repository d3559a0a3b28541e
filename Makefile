# Targets for people and for CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NIXL := 1.5.1

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | sort | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

# nixl's metadata asks for torch, which kvhma does not use: install it without its dependencies.
$(VENV)/.tools: pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check numpy "click>=8.1" "rich>=13" "maturin>=1.9.4,<2"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps nixl==$(NIXL) nixl-cu12==$(NIXL)
	touch $@

$(VENV)/.dev: $(VENV)/.tools
	$(BIN)/python -m pip install -q --disable-pip-version-check "hypothesis>=6.100" "pytest>=8" "pytest-benchmark>=5" \
		"pytest-timeout>=2.3" "pytest-xdist>=3.6" "mypy>=1.14" "ruff>=0.9"
	touch $@

RUST := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
$(VENV)/.built: $(VENV)/.tools $(RUST) pyproject.toml
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release -q
	touch $@

.PHONY: build
build: $(VENV)/.built ## set up .venv and build the package into it

.PHONY: dev
dev: $(VENV)/.dev $(VENV)/.built ## build, and install what tests and lint need
