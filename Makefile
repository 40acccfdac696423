# Two commands: `make demo` runs the main job, `make test` runs every check. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the demo asks.
DEMO := tune examples/char_gpt.py:workload --memory 64MiB --steps 120 --noise-batch 32
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test types tests test-all test-floor test-newest format docs site clean

help:
	@echo "make demo    install, then tune a small GPT under a memory budget, and write its report to demo.html"
	@echo "make test    install, then lint, type-check and run all tests but the slow ones"
	@echo "make test-all   the slow ones too"
	@echo "make test-floor, make test-newest   the tests that need torch alone, on the oldest and the newest torch (gigabytes)"
	@echo "make docs    write the generated pages under docs/ anew"
	@echo "make site    the documentation and the calculator as a site, in site/ (needs npm, for Pyodide)"
	@echo "make format  apply the formatter and the safe lint fixes"
	@echo "make clean   remove .venv and caches"

demo: $(VENV)/.ready-to-run
	@echo "A small GPT learns the characters of Python's own manual, within 64 MiB. Which batch? (about two minutes)"
	@echo '$$ batchwright $(DEMO) --run-file demo.json'
	@echo
	@$(BIN)/batchwright $(DEMO) --run-file demo.json
	@echo
	@echo "Does splitting a batch change the training? 32 at once, 4 times 8 and 8 times 4, from the same weights:"
	@echo '$$ python examples/three_splits.py'
	@echo
	@$(BIN)/python examples/three_splits.py
	@echo
	@echo "All of it on one page:"
	@echo '$$ batchwright report demo.json -o demo.html'
	@echo
	@$(BIN)/batchwright report demo.json -o demo.html

test: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types tests

# Side by side: the types are one process's work, and would leave the other cores idle.
types: $(VENV)/.ready-to-test
	$(BIN)/mypy

# One thread for each of the two workers: more would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

tests: $(VENV)/.ready-to-test
	$(PYTEST) -m "not slow"

# Those marked slow too: each repeats at length what a shorter test beside it shows; and properties on new examples.
test-all: test
	$(PYTEST) --hypothesis-profile new-examples -m "slow or hypothesis"

# The ends of the range that pyproject.toml declares, each in an environment of its own, without constraints. The core is
# what leans on torch most (private names, kernels, patches, hooks, the state of models and optimizers) and imports no
# framework, as these environments have none. Another Python: make PYTHON=... test-newest
CORE := $(addprefix tests/accumulate/test_, micro_batches.py precise.py step.py weights.py) \
  $(addprefix tests/device/test_, counted_bytes.py step.py) \
  $(addprefix tests/memory/test_, on_card.py) \
  $(addprefix tests/noise/capture/test_, half_batches.py own_loop.py) \
  $(addprefix tests/simulated/test_, card.py ranks.py torch_names.py) \
  $(addprefix tests/simulated/operators/test_, attention.py autocast.py) \
  $(addprefix tests/simulated/torch_patches/test_, compiled.py patches.py redirected_calls.py) \
  $(addprefix tests/state/test_, kept_state.py untouched.py) \
  $(addprefix tests/trace/test_, attention_workspace.py cpu_kernels.py cpu_workspaces.py gradient_adds.py host_batches.py \
    outside_tensors.py trace.py)
CORE_TOOLS := pytest pytest-xdist hypothesis
FLOOR := torch==2.10.0 numpy==1.26.0 click==8.1.7 rich==13.7.0
NEWEST := torch numpy click rich pyyaml

test-floor: .venv-floor/.ready
	OMP_NUM_THREADS=1 .venv-floor/bin/python -m pytest -n 2 -m "not slow" $(CORE)

test-newest: .venv-newest/.ready
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest -n 2 -m "not slow" $(CORE)

.venv-floor/.ready: PACKAGES = $(FLOOR)
.venv-newest/.ready: PACKAGES = --upgrade $(NEWEST)
.venv-floor/.ready .venv-newest/.ready: pyproject.toml
	@echo "Installing $(PACKAGES) into $(@D) (once; gigabytes where torch has no CPU build) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES) $(CORE_TOOLS) --editable .
	@touch $@

format: $(VENV)/.ready-to-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready-to-test
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/schemas.py

site: $(VENV)/.ready-for-site
	$(BIN)/python website/build_site.py --out site
	@echo "Look at it: python3 -m http.server --directory site"

# One stamp per set of packages, so that the demo does not wait for the frameworks that only the tests need.
$(VENV)/.ready-to-run: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing batchwright into $(VENV) (once; PyTorch is large) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-to-test: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing batchwright and what its tests need into $(VENV) (once; a few minutes) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.ready-to-run

$(VENV)/.ready-for-site: $(BIN)/python pyproject.toml
	@echo "Installing batchwright and what its site needs into $(VENV) (once) ..."
	@$(PIP) --editable '.[site]'
	@touch $@ $(VENV)/.ready-to-run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"batchwright needs Python 3.11 or newer; $(PYTHON) is {v}. Name another: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build site .venv-floor .venv-newest .mypy_cache .pytest_cache .ruff_cache .hypothesis
