# Manta: everything a newcomer runs. Each target does its own set-up; a second run is quick.
PYTHON ?= python3
CONFIG ?= serve_config.yaml
TRACE ?= ../shared/traces/conversation_trace.jsonl
VENV := .venv
# programs that tests run, and the packages of Debian that have them
PROGRAMS := prometheus promtool chromium chromedriver ip
DEBIAN := prometheus chromium chromium-driver fonts-dejavu-core iproute2
# libraries whose requests tests send, from an environment of their own (tests/clients)
CLIENTS := 'litellm[mcp]>=1.106,<2' 'openai>=2.54,<4' 'anthropic>=2.12,<3' 'instructor>=1.17,<2' \
	'pydantic-ai-slim[openai]>=2.31,<3' 'langchain-openai>=1.7,<2' 'ollama>=0.6,<1'
BIN := $(VENV)/bin
# WHAT LOG ARGS: pip's output goes to the log, and its newest line is shown
INSTALL := sh tools/install.sh $(BIN)/python
# what Manta runs with, each file of it by its hash; with `make LOCK=` the newest that pyproject.toml allows, unchecked
LOCK := constraints.txt
GOALS := $(MAKECMDGOALS)
UV := uv==0.13.9
# not in it: PyTorch, whose builds for a CPU and for CUDA differ under one version, and what only the latter needs
UNLOCKED := ^(torch|triton|nvidia-|cuda-)
# PyTorch's build: cpu; cuda or keep, the one of pip's own index; empty: cpu where no GPU is seen (tools/torch.sh)
TORCH :=
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# of `python -m benchmarks`, in this order: those that serve come last, the longest at the end
BENCHES := kernels engine serving
# what kernels that are kept on disk are made of
KERNELS := $(wildcard replicas/kernels/*.py replicas/kernels/*/*.py replicas/attention/cpu*.py)
# trials of each fault; of the soak
TIMES := 20
MINUTES := 60
# and on a CPU that has more than AVX2, held to it: command:part:part
BENCHES_AVX2 := kernels:limits:products engine:speed:formats

# A machine with a GPU often has a Python with PyTorch, and no network: it is taken as it is.
GPU_PYTHON = $(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))
GPU_NEEDS := torch transformers numba psutil xxhash msgspec filelock llguidance
LACKS := import sys; from importlib.util import find_spec; lacks = [name for name in sys.argv[1:] if not find_spec(name)]; \
	lacks and sys.exit(f"{sys.executable} lacks what this needs; install it: {sys.executable} -m pip install " + " ".join(lacks))

.DEFAULT_GOAL := help
.PHONY: help serve test-ready model-and-kernels test test-all test-cluster chaos soak install-gpu test-gpu bench-gpu gpu-ten-minutes lint bench bench-peers simulate dashboards docs site pictures \
	board-pictures model install \
	install-test tools-test lock clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml $(LOCK) | $(BIN)/python
	@test -z "$(LOCK)" || $(INSTALL) "Installing what $(LOCK) lists" $(VENV)/install-locked.log --no-deps --require-hashes \
		--only-binary :all: -r $(LOCK) || { echo "Not all of $(LOCK) can be had for this machine, or a file is not the one that it \
	lists. To take the newest that pyproject.toml allows, unchecked: make $(GOALS) LOCK=" >&2; exit 1; }
	@sh tools/torch.sh $(BIN)/python $(VENV)/install-torch.log '$(TORCH)' '$(TORCH_INDEX)'
	@$(INSTALL) "Installing Manta into $(VENV)" $(VENV)/install.log \
		$(if $(LOCK),--no-build-isolation) --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@$(INSTALL) "Installing what the tests need" $(VENV)/install-test.log --editable '.[test]'
	@touch $@

$(VENV)/.installed-plots: $(VENV)/.installed
	@$(INSTALL) "Installing what draws plots" $(VENV)/install-plots.log --editable '.[plots]'
	@touch $@

$(VENV)/.installed-site: $(VENV)/.installed
	@$(INSTALL) "Installing what makes the site" $(VENV)/install-site.log --editable '.[site]'
	@touch $@

install: $(VENV)/.installed ## Make .venv and install the project
install-test: $(VENV)/.installed-test

# installs only as root; a program that is missing skips its tests
tools-test: | $(BIN)/python
	@which $(PROGRAMS) >/dev/null || { test "$$(id -u)" = 0 && which apt-get >/dev/null && \
		echo "Installing Debian's packages $(DEBIAN)" && apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(DEBIAN) >/dev/null; } || \
		echo "not all of these are on PATH: $(PROGRAMS). Their tests are skipped; apt-get install $(DEBIAN)" >&2
	@test "$$(cat .tools/clients/list 2>/dev/null)" = "$(CLIENTS)" || { rm -rf .tools/clients.new && \
		$(BIN)/python -m venv .tools/clients.new && sh tools/install.sh \
		.tools/clients.new/bin/python "Installing client libraries" .tools/clients.log $(CLIENTS) && \
		echo "$(CLIENTS)" > .tools/clients.new/list && rm -rf .tools/clients && mv .tools/clients.new .tools/clients; } || echo "client libraries could not be installed: their tests are skipped" >&2

lock: ## Write constraints.txt anew: the newest that pyproject.toml allows, on any Python and machine, with hashes
	@test -x .tools/uv/bin/uv || { $(PYTHON) -m venv .tools/uv && \
		sh tools/install.sh .tools/uv/bin/python "Installing uv" .tools/uv.log '$(UV)'; }
	@.tools/uv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate \
		pyproject.toml -o .tools/locked.txt --upgrade
	@awk '/^[a-z]/ {keep = $$0 !~ /$(UNLOCKED)/} keep' .tools/locked.txt > constraints.txt

model: $(VENV)/.installed ## Fetch and convert the embedded model (once)
	@$(BIN)/python -m tools.embedded_model

$(VENV)/.kernels: $(VENV)/.installed $(KERNELS)
	@$(BIN)/python -m tools.kernels && touch $@ || true

serve: $(VENV)/.installed ## Serve $(CONFIG) in the foreground; Ctrl-C stops all of it (CONFIG=other.yaml)
	@$(MAKE) --no-print-directory -j 2 model $(VENV)/.kernels
	@$(BIN)/python -m deployments serve $(CONFIG)

# side by side: each by itself leaves one of two cores idle, or waits for the network
test-ready:
	@$(MAKE) --no-print-directory -j 3 tools-test model-and-kernels GOALS='$(MAKECMDGOALS)'
model-and-kernels: install-test
	@$(MAKE) --no-print-directory --silent model $(VENV)/.kernels

test: test-ready ## Run the tests that every change is checked with; those with Ray run beside the others
	@$(BIN)/python -m tests quick

test-all: test-ready ## And then those that are marked slow, and arithmetic under AVX2 too: what CI runs
	@$(BIN)/python -m tests quick slow

test-cluster: test-ready ## Run the tests of a Ray cluster whose nodes vanish: four machines of namespaces, as root
	@MANTA_REQUIRE_TOOLS=1 MANTA_REQUIRE_MACHINES=1 $(BIN)/python -m pytest -s tests/cluster

chaos: install-test tools-test model ## Kill, stop, cut off and fill what serves, under streams (TIMES=3, ARGS="machine --only router")
	@$(BIN)/python -m benchmarks chaos --times $(TIMES) --json bench_results/chaos.json $(ARGS)

soak: install-test model ## Load that is more than is carried, with a kill a minute, for MINUTES=60
	@$(BIN)/python -m benchmarks soak --minutes $(MINUTES) --json bench_results/soak.json

install-gpu: $(VENV)/.installed ## Add FlashInfer to .venv, whose kernels nvcc compiles when first used (docs/gpu.md)
	@$(INSTALL) "Installing FlashInfer" $(VENV)/install-gpu.log --editable '.[gpu]'

test-gpu: ## Run the tests of what runs on a GPU (there, or what of it a CPU can); installs nothing, needs no Ray
	@$(GPU_PYTHON) -c '$(LACKS)' pytest $(GPU_NEEDS)
	@$(GPU_PYTHON) -m pytest tests/gpu tests/unit/runner/test_device_draw.py tests/unit/runner/test_token_counts.py

bench-gpu: ## Measure the engine on a GPU against its limits; installs nothing, needs no Ray. JSON under bench_results/
	@$(GPU_PYTHON) -c '$(LACKS)' $(GPU_NEEDS)
	@$(GPU_PYTHON) -m benchmarks gpu --json bench_results/gpu.json

gpu-ten-minutes: ## All that a GPU can show in ten minutes, and a file of it (ARGS=--fake without one); installs nothing, needs no Ray
	@$(GPU_PYTHON) -c '$(LACKS)' pytest $(GPU_NEEDS)
	@$(GPU_PYTHON) -m benchmarks.gpu.ten_minutes ten-minutes $(ARGS)

lint: install-test ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: install-test model ## Measure all that needs no other system and no GPU: an hour. JSON under bench_results/
	@echo "An hour on two quiet cores: $(BENCHES); under AVX2 too: $(BENCHES_AVX2)"
	@failed=; for part in $(BENCHES); do \
		$(BIN)/python -m benchmarks $$part --json bench_results/$$part.json || failed="$$failed $$part"; \
	done; \
	if $(BIN)/python -c 'from replicas.kernels.instructions import allowed; exit("avx512" not in allowed())'; then \
		for part in $(BENCHES_AVX2); do \
			echo "Under MANTA_CPU=avx2: $$part"; MANTA_CPU=avx2 $(BIN)/python -m benchmarks $$(echo $$part | tr : " ") \
				--json bench_results/$${part%%:*}_avx2.json || failed="$$failed $$part"; \
		done; \
	fi; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

bench-peers: model ## Manta, vLLM, Transformers and llama.cpp in one run; installs them into .peers (ARGS="--quick")
	@$(BIN)/python -m benchmarks peers --json bench_results/peers.json $(ARGS)

simulate: $(VENV)/.installed-plots ## Every routing policy over simulated replicas on $(TRACE), or generated chats without it
	@$(BIN)/python -m benchmarks router simulate --requests 4000 $(if $(wildcard $(TRACE)),--trace $(TRACE),--workload multi-turn) \
		--policy round_robin --policy power_of_two --policy least_tokens --policy prefix_threshold \
		--policy estimated_ttft --policy oracle \
		--json bench_results/simulate.json --plot bench_results/simulate.svg
	@$(BIN)/python -m benchmarks router tenants

dashboards: install-test ## Write the boards and docs/metrics.md anew, from dashboards/catalog.py and dashboards/boards
	@$(BIN)/python -m dashboards build
	@$(BIN)/python -m dashboards docs

docs: install-test ## Write the tables of docs/api.md, docs/routing.md and docs/metrics.md anew, from the code
	@$(BIN)/python -m tools.api_doc
	@$(BIN)/python -m dashboards docs

site: $(VENV)/.installed-site ## Make the documents one searchable site in site/, and check every link; it needs no network
	@rm -rf .tools/site && mkdir -p .tools/site
	@git ls-files -z '*.md' docs deploy tools/house.py tools/diagrams.py | xargs -0 cp --parents -t .tools/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "site/ is made. To read it: open site/index.html in a browser"

pictures: install-test model ## Draw the house in docs/pictures anew, and take those of the live view from a Manta under load
	@$(BIN)/python -m tools.house
	@$(BIN)/python -m tests.serve.pictures

board-pictures: install-test model ## Draw the boards in docs/pictures with Grafana's components from npm, over a Manta under load
	@$(BIN)/python -m tests.serve.board_pictures

clean: ## Remove .venv, other systems, models and results
	@rm -rf $(VENV) .tools .peers models bench_results .pytest_cache .mypy_cache .ruff_cache
