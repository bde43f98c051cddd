# All but `help` and `clean` work in .venv, which is made first, and again when the contents of these files have changed.
READY := .venv/ready-$(shell cat settings.ini pyproject.toml setup.py | cksum | cut -d' ' -f1)
PYTHON := $(or $(PYTHON),$(shell command -v python3))
PREPARE := nbdev-export && nbdev-clean && python docs/build.py --readme-only

export VIRTUAL_ENV := $(CURDIR)/.venv
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
export OMP_NUM_THREADS := 1
export PYTHONWARNINGS := ignore::FutureWarning
# Tests start a hundred processes: without bytecode on disk, each compiles 3,500 modules of torch and fastai anew, for 8 seconds
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test quick test-all types coverage dist docs notebooks bench gpu mutants leaderboard prepare clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 13

$(READY):
	$(PYTHON) -m venv --without-pip .venv
	$(PYTHON) -m pip --python .venv/bin/python --disable-pip-version-check install -q uv
	uv pip uninstall -q fastsparse && rm -rf fastsparse.egg-info
	uv pip install -q pip -e '.[dev]'
	rm -f .venv/ready-* && touch $@

demo: $(READY) ## train dense, static and dynamic sparse networks on real digits, and show the table
	python benchmarks/demo.py

test: $(READY) ## style, files in step with the notebooks, notebooks, tests, and a site without warnings
	@PREPARE="$(PREPARE)" python tests/parts.py

quick: $(READY) ## tests and pages of what differs from main, and of what imports it, in a minute or two
	@python tests/parts.py --quick

test-all: $(READY) ## install every extra, and run all tests, those too that take long or need an extra
	uv pip install -q -e '.[dev,all,check,met]'
	mypy
	nbdev-test --flags slow
	python -m pytest -q -m ''

types: $(READY) ## check the types of a small program that uses the public names
	uv pip install -q -e '.[dev,check]'
	mypy

coverage: $(READY) ## which lines the tests run, in htmlcov
	uv pip install -q -e '.[dev,check]'
	python -m pytest -q -n auto --dist worksteal --cov --cov-report=term --cov-report=html

dist: $(READY) ## wheel and sdist in dist/, tried in an empty environment
	uv pip install -q -e '.[dev,check]'
	rm -rf build dist
	uv build -q -o dist
	python tests/try_dist.py dist

docs: $(READY) ## README.md, and the site in docs/_build/html
	python docs/build.py

notebooks: $(READY) ## open the notebooks in Jupyter
	jupyter notebook --notebook-dir nbs $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(READY) ## time sparse training against dense training and its peers, where they can be installed; fails if a usual line became slow
	-uv pip install -q -e '.[bench]'
	python benchmarks/run.py
	python benchmarks/floors.py --pictures

gpu: $(READY) ## on a CUDA machine: all tests that need one, then step overhead, updates, 2:4 training and export, and blocks
	-uv pip install -q -e '.[bench]'
	python -m pytest -q -m cuda
	python benchmarks/gpu.py
	python benchmarks/blocks.py

mutants: $(READY) ## make 600 mistakes in the core, one at a time, and count those that its tests notice, an hour or more: it can be stopped, and goes on
	python tests/mutants.py

leaderboard: $(READY) ## train sparse networks and dense ones of many widths for equal seconds (hours, resumable)
	uv pip install -q -e '.[bench]'
	cd benchmarks && python -m leaderboard

prepare: $(READY) ## after editing a notebook: export the modules, clean the notebooks, write README.md
	$(PREPARE)

clean: ## remove what was built, but not .venv
	rm -rf _proc docs/_build build dist htmlcov .coverage demo_results .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
