# Two commands: `make demo` runs the main job, `make test` runs every check. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo test types tests test-all format docs clean

help:
	@echo "make demo    install, then predict a small GPT's memory, find its micro-batch and plan its batch"
	@echo "make test    install, then lint, type-check and run all tests"
	@echo "make docs    write the generated pages under docs/ anew"
	@echo "make format  apply the formatter and the safe lint fixes"
	@echo "make clean   remove .venv and caches"

demo: $(VENV)/.ready-to-run
	@echo "First, the memory of one training step of a small GPT, predicted:"
	@echo '$$ batchwright estimate examples/tiny_gpt.py:workload --micro-batch 32'
	@echo
	@$(BIN)/batchwright estimate examples/tiny_gpt.py:workload --micro-batch 32
	@echo
	@echo "Second, the largest micro-batch that fits into 512 MiB, found by running it (about half a minute):"
	@echo '$$ batchwright fit examples/tiny_gpt.py:workload --memory 512MiB --accumulate-to 32'
	@echo
	@$(BIN)/batchwright fit examples/tiny_gpt.py:workload --memory 512MiB --accumulate-to 32
	@echo
	@echo "Third, every way to reach an effective batch of 32 over 10,000 samples, and what each costs:"
	@echo '$$ batchwright plan 32 --micro-batch 8 --samples 10000 --drop-last'
	@echo
	@$(BIN)/batchwright plan 32 --micro-batch 8 --samples 10000 --drop-last

test: $(VENV)/.ready-to-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types tests

# Side by side: the types are one process's work, and would leave the other cores idle.
types: $(VENV)/.ready-to-test
	$(BIN)/mypy

tests: $(VENV)/.ready-to-test
	$(BIN)/python -m pytest -n 2 -m "not slow"

# The slow ones too (tests/slow.py).
test-all: test
	$(BIN)/python -m pytest -n 2 -m slow

format: $(VENV)/.ready-to-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.ready-to-run
	$(BIN)/python docs/generate.py

# One stamp per set of packages, so that the demo does not wait for the frameworks that only the tests need.
$(VENV)/.ready-to-run: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing batchwright into $(VENV) (once; PyTorch is large) ..."
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-to-test: $(BIN)/python pyproject.toml constraints.txt
	@echo "Installing batchwright and what its tests need into $(VENV) (once; a few minutes) ..."
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.ready-to-run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(0 if sys.version_info >= (3, 11) else f"batchwright needs Python 3.11 or newer; $(PYTHON) is {v}. Name another: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
