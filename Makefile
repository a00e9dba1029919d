# `make bench` and `make test` are all a newcomer needs; both set up .venv on their first run.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
CELL   := src/untax/_native/cell
# Frames for each parser. Short enough for every change; the goal before a release is FUZZ_RUNS=10000000.
FUZZ_RUNS ?= 200000

.DEFAULT_GOAL := help
.PHONY: help venv cell bench bench-budgets test native-test unit lint format fuzz wheels clean

help:
	@echo "make bench          the quick plan on every substrate of this machine, in under three minutes"
	@echo "make test           C and Python tests, as root also a second time as an ordinary user"
	@echo "make lint           formatter, linter, strict types, and the C sources with -Werror"
	@echo "make bench-budgets  every performance budget, into results/budgets.json"
	@echo "make native-test    C unit tests under ASan and UBSan"
	@echo "make fuzz           every parser; FUZZ_RUNS=$(FUZZ_RUNS) frames each"
	@echo "make wheels         x86_64, aarch64 and pure-Python wheels into dist/"
	@echo "make clean          remove everything that the above made"

# ---- the environment: an editable install, and the cell rebuilt in place when a source changes ----

# Enough to measure with: a newcomer's first command does not wait for Ray and every provider's SDK.
$(VENV)/measures: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	scripts/editable-install $(PY) kubernetes,png,server
	@touch $@

# All that tests and changes need.
$(VENV)/stamp: pyproject.toml | $(VENV)/measures
	scripts/editable-install $(PY) dev
	@touch $@

$(CELL): CMakeLists.txt src/untax/__init__.py $(wildcard native/*.c native/*.h) | $(VENV)/measures
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake -S . -B build/dev -G Ninja -DUNTAX_INPLACE=ON --log-level=WARNING
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cmake --build build/dev -- --quiet
	@touch $@

venv: $(VENV)/stamp
cell: $(CELL)

# ---- what a change must pass ----

lint: $(VENV)/stamp
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	scripts/native-lint

format: $(VENV)/stamp
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

native-test:
	scripts/native-test

unit: $(CELL) $(VENV)/stamp
	$(PY) -m pytest -q tests/unit

test: $(CELL) $(VENV)/stamp native-test
	scripts/run-tests $(PY)

fuzz: $(VENV)/stamp
	scripts/fuzz $(PY) $(FUZZ_RUNS)

# ---- measuring ----

# With the installation of a fresh clone within three minutes.
bench: $(CELL)
	$(VENV)/bin/untax bench --quick --budget 140

bench-budgets: $(CELL) $(VENV)/stamp
	$(PY) -m benchmarks --json results/budgets.json

# ---- shipping ----

wheels: $(VENV)/stamp
	scripts/build-wheels $(PY)

clean:
	rm -rf $(VENV) build dist results src/untax/_native .mypy_cache .ruff_cache
