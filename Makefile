# make demo, make test: set up .venv and run; make check: what continuous integration runs.
# Everything that is installed has the version that constraints.txt pins.

BIN := .venv/bin
STAMP := .venv/installed
export PIP_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
IN_RANGE := import sys, venv, ensurepip; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: demo test rest check format lint types contracts notebooks coverage exports setup clean

demo: $(STAMP)
	$(BIN)/autopar demo

# How many tests run at once; and for the rest, the day that chooses a part of it (YYYY-MM-DD; default: today).
JOBS := 2
DATE :=
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --costs build/tests.json

test: $(STAMP)
	$(PYTEST) --tier core $(BUDGET)

rest: $(STAMP)
	$(PYTEST) --tier rest $(if $(DATE),--date $(DATE))

check: BUDGET := --budget 900
check: format lint types contracts test rest notebooks

format: $(STAMP)
	$(BIN)/ruff format --check .

# The second: docstrings name no argument that there is not, which renames leave behind.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select DOC102 .

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports

notebooks: $(STAMP)
	$(BIN)/python notebooks/execute.py

# What other trainers make of exported plans, in an environment of theirs; slow, and no part of the tests.
exports: $(STAMP) .exports/installed
	$(BIN)/python benchmarks/exports.py --targets .exports/bin/python --json benchmarks/results/exports.json

.exports/installed: export PIP_CONSTRAINT := benchmarks/exports.txt
.exports/installed: benchmarks/exports.txt
	$(BIN)/python -m venv --clear .exports
	.exports/bin/python -m pip install "$$(grep '^torch==' benchmarks/exports.txt)" setuptools wheel ninja
	DS_BUILD_OPS=0 .exports/bin/python -m pip install --quiet --requirement benchmarks/exports.txt
	@touch .exports/installed

coverage: $(STAMP)
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

setup: $(STAMP)

# torch comes first and alone, so that its pinned version is settled before anything else asks for a torch.
$(STAMP): pyproject.toml constraints.txt
	@found=""; if ! $(BIN)/python -c '$(IN_RANGE)' 2>/dev/null; then \
	    for python in python3 python3.11 python3.12 python3.13; do \
	        if "$$python" -c '$(IN_RANGE)' >/dev/null 2>&1; then found="$$python"; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "autopar needs Python 3.11, 3.12 or 3.13 with venv and pip, and found none among" \
	             "python3, python3.11, python3.12 and python3.13 (on Debian and Ubuntu: apt install python3-venv)" >&2; \
	        exit 1; \
	    fi; \
	    "$$found" -m venv --clear .venv; \
	fi
	$(BIN)/python -m pip install --quiet pip setuptools
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	@touch $(STAMP)

clean:
	rm -rf .venv .exports build dist autopar.egg-info autopar-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	    .import_linter_cache .coverage
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
