# Two commands matter: `make demo` and `make test`. Both set up what they need first.

SHELL := /bin/bash
BIN := .venv/bin
CODE := src tests scripts
# A test must not fail because all cores of a busy machine are asked to work on one small matrix.
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_DISABLE_TELEMETRY=1

.PHONY: help setup setup-demo demo test lint format docs clean
.NOTPARALLEL:

help:
	@echo 'make demo     set up, and show a hand-off between two nodes on this machine (KEEP=1: and keep them)'
	@echo 'make test     set up, check style and types, run every test'
	@echo 'make setup    only set up: .venv with everything in it, real vLLM for the tests included'
	@echo 'make lint     check style and types'
	@echo 'make format   put the code into the house style'
	@echo 'make docs     write what docs/ takes from the code'
	@echo 'make clean    remove .venv and every cache'

setup:
	@scripts/setup.sh all

setup-demo:
	@scripts/setup.sh demo

demo: setup-demo
	@$(BIN)/tandem demo $(if $(KEEP),--keep)

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

test: lint
	-@$(BIN)/python scripts/fetch_gemma3.py
	@$(TEST_ENV) $(BIN)/python -m pytest

format: setup
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: setup
	$(BIN)/python scripts/write_docs.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
