# SPDX-License-Identifier: Apache-2.0
# Every command sets up what it needs (scripts/setup); a second run finds nothing to do.

PY := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup demo test coverage check generate docs bench stacks fuzz mutants bundle wheels clean distclean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## install packages, build the native module, fill .venv
	@scripts/setup build demo test check bench

demo:  ## record a real workload, print the summary, leave demo/report.html
	@scripts/setup build demo
	@demo/run

test:  ## the whole test suite (root: kernel tests too); PYTEST_ARGS= goes to pytest
	@scripts/setup build demo test
	@scripts/run_tests $(PYTEST_ARGS)

coverage:  ## share of the Python code that the tests run, by package; without tests/kernel, whose times it would change
	@scripts/setup build demo test
	@env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest -q --cov=sonde --cov-report=json:build/coverage.json \
	  tests/unit tests/golden tests/integration $(PYTEST_ARGS); status=$$?; \
	  $(PY) scripts/coverage_by_package.py build/coverage.json; exit $$status

check:  ## lint, types, format, dependency rules
	@scripts/setup build check
	@scripts/check

generate:  ## write again what is made from other files: row types, the ABI's twin, reference pages, types of the page
	@scripts/setup build check
	@for name in row_types inject_types metrics_docs health_docs cli_docs support_matrix web_types; do \
	  $(PY) scripts/$$name.py || exit 1; done

docs:  ## the site in build/site, manual pages in build/man, completions in build/completions
	@scripts/setup build docs
	@$(PY) scripts/cli_docs.py --into build
	@NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q

bench:  ## overhead and accuracy, beside perf and py-spy
	@scripts/setup build demo bench
	@$(PY) -m bench

stacks:  ## share of whole stacks, beside perf, py-spy and OpenTelemetry's profiler; of right ones; their cost
	@scripts/setup build demo bench
	@$(PY) -m bench.stacks
	@$(PY) -m bench.stacks.truth
	@$(PY) -m bench.stacks.limits

SECONDS ?= 30
fuzz:  ## fuzz every reader of what others wrote, each for SECONDS (30)
	@scripts/setup build fuzz
	@$(PY) -m fuzz --seconds $(SECONDS)

MINUTES ?= 60
mutants:  ## change the code at random places, see whether a test fails; goes on for MINUTES (60)
	@scripts/setup build demo test mutation
	@nice $(PY) -m bench.mutation --minutes $(MINUTES)

wheels:  ## the wheel and the source distribution in dist/, checked in bare environments (root: it records)
	@scripts/setup build
	@scripts/wheels

bundle:  ## wheel and dependencies for a host without a network, in dist/bundle
	@scripts/setup build
	@$(PY) scripts/bundle.py

clean:  ## forget what was built; keep .venv
	rm -rf build dist demo/out demo/report.html .mypy_cache .ruff_cache .pytest_cache
	rm -f src/sonde/_native*.so src/sonde/_fleet*.so
	find src tests bench demo scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## forget everything that setup made
	rm -rf .venv
