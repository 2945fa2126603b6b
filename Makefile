# Manta: everything a newcomer runs. Each target does its own set-up; a second run is quick.
PYTHON ?= python3
CONFIG ?= serve_config.yaml
TRACE ?= ../shared/traces/conversation_trace.jsonl
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help serve test test-gpu bench-gpu lint bench bench-peers simulate dashboards pictures model install \
	install-test tools-test clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(VENV)/.installed: pyproject.toml
	@echo "Installing Manta into $(VENV) (once) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "Installing what the tests need ..."
	@$(PIP) install --editable '.[test]'
	@touch $@

install: $(VENV)/.installed ## Make .venv and install the project
install-test: $(VENV)/.installed-test

tools-test: $(VENV)/.installed-test # Prometheus, of Debian's package; where it cannot be had, its tests are skipped
	@$(BIN)/python -m tools.debian promtool prometheus >/dev/null

model: $(VENV)/.installed ## Fetch and convert the embedded model (once)
	@$(BIN)/python -m tools.embedded_model

serve: model ## Serve $(CONFIG) in the foreground; Ctrl-C stops all of it (CONFIG=other.yaml)
	@$(BIN)/python -m deployments serve $(CONFIG)

test: install-test tools-test model ## Run all tests
	@$(BIN)/python -m pytest

test-gpu: ## Run the tests of what runs on a GPU (there, or what of it a CPU can); needs no Ray
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m pytest tests/gpu

bench-gpu: ## Measure the engine on a GPU against its limits; needs no Ray. JSON under bench_results/
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu --json bench_results/gpu.json

lint: install-test ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: install-test model ## Measure kernels, caches, the engine, hand-offs and what long prompts do; JSON under bench_results/
	@$(BIN)/python -m benchmarks --json bench_results/latest.json
	@$(BIN)/python -m benchmarks.token_path --json bench_results/token_path.json
	@$(BIN)/python -m benchmarks.live_stalls --json bench_results/live_stalls.json
	@$(BIN)/python -m benchmarks.watch_overhead --json bench_results/watch_overhead.json
	@$(BIN)/python -m benchmarks.sweep --json bench_results/sweep.json

bench-peers: model ## Manta, vLLM, Transformers and llama.cpp in one run; installs them into .peers (ARGS="--quick")
	@$(BIN)/python -m benchmarks.peers --json bench_results/peers.json $(ARGS)

simulate: $(VENV)/.installed ## Every routing policy over simulated replicas on $(TRACE), or generated chats without it
	@$(BIN)/python -m benchmarks.simulate $(if $(wildcard $(TRACE)),--trace $(TRACE),--workload multi-turn) \
		--policy round_robin --policy power_of_two --policy least_tokens --policy prefix_threshold \
		--policy estimated_ttft --policy oracle \
		--json bench_results/simulate.json --plot bench_results/simulate.svg

dashboards: install-test ## Write the boards, the rules and docs/metrics.md anew, from dashboards/catalog.py
	@$(BIN)/python -m dashboards build
	@$(BIN)/python -m dashboards docs

pictures: install-test model ## Take the pictures of the live view in docs/pictures anew, from a Manta under load
	@$(BIN)/python -m tests.serve.pictures

clean: ## Remove .venv, other systems, models and results
	@rm -rf $(VENV) .tools .peers models bench_results .pytest_cache .mypy_cache .ruff_cache
