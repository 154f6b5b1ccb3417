.DEFAULT_GOAL := help
.PHONY: help demo serve-demo test coverage lint bench bench-gpu docs serve-docs dist

MAKEFLAGS += --jobs=2

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS = $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)# one more than cores, since some tests mostly wait
BENCHMARKS := $(filter-out %_gpu.py %/chaos.py,$(wildcard benchmarks/*.py))

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST)

demo: $(READY) ## a first look at what SPCL does
	$(BIN)/python examples/demo.py

serve-demo: $(READY) ## a service on five simulated sensors, and its page; make serve-demo REDIS=1 with a redis-server
	$(BIN)/python examples/serve_demo.py $(if $(REDIS),--redis)

test: lint docs ## everything that must hold before a commit
	$(PYTEST)

coverage: $(READY) ## the tests, and which lines they reach
	$(PYTEST) --cov --cov-fail-under=90

lint: $(READY) ## style and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

docs: $(READY) ## the documentation site, in docs/build, without a network; warnings are errors
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --jobs auto docs docs/build
	$(BIN)/python docs/check_links.py docs/build
	@echo "the site is in docs/build/index.html"

serve-docs: docs ## the same, shown at http://localhost:8000
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory docs/build 8000

dist: $(READY) ## wheel and source archive in dist, checked
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

bench: $(READY) ## every benchmark that needs no GPU (those that do are named *_gpu.py); not chaos.py, which runs for an hour
	@for benchmark in $(BENCHMARKS); do $(BIN)/python $$benchmark || exit 1; done

CIFAR = $(if $(DATA),--data-dir $(DATA)) $(if $(PROTOCOL),--protocol $(PROTOCOL))

bench-gpu: $(READY) ## those that need a GPU; make bench-gpu DATA=folder PROTOCOL=ps-cifar100.json for files you have
	$(BIN)/python benchmarks/step_gpu.py --compile
	$(BIN)/python benchmarks/sources_gpu.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/nccl_gpu.py
	$(BIN)/python benchmarks/peers_gpu.py
	$(BIN)/python benchmarks/run_gpu.py $(CIFAR)
	$(BIN)/python benchmarks/bookkeeping.py --device cuda --benchmark ps-cifar100 --set preset=paper --set precision=bfloat16 $(CIFAR)
	$(BIN)/python benchmarks/grid_gpu.py $(CIFAR)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
