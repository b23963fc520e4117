# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
WORKERS ?= 2
PARALLEL ?= -n auto --dist loadgroup --no-loadscope-reorder
BIN     = $(VENV)/bin
# Modules are compiled when they are first imported: most of torch and transformers never is.
PIP     = $(BIN)/python -m pip install --quiet --no-compile

.PHONY: demo test chromium lint docs web bench experiments sanitize wheel matrix clean

demo: $(VENV)/.installed
	$(BIN)/gradtrace demo --out out/demo.html

# `make test THOROUGH=1` runs everything: all samples of all operators, a thousand random graphs.
test: $(VENV)/.developed chromium
	GRADTRACE_THOROUGH=$(THOROUGH) $(BIN)/python -m pytest $(PARALLEL)

# The browser tests want Chromium: installed where that is allowed, else they are skipped.
chromium:
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq && \
	  apt-get install -y -qq chromium > /dev/null; } || \
	echo "SKIPPED: the browser tests, as there is no Chromium here and it cannot be installed"

lint: $(VENV)/.developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into out/docs; nothing is fetched, and a warning is an error.
docs: $(VENV)/.developed
	$(BIN)/python -m sphinx -q -W --keep-going docs out/docs

# The report's page, into gradtrace/report/template.html, which is committed: users need no Node.
web:
	cd web && npm ci --no-fund --no-audit && npm run check && npm test && npm run build

# Tracing beside PyTorch's backward pass, on this machine: a table, and out/benchmarks.json.
bench: $(VENV)/.developed
	$(BIN)/python benchmarks/bench.py --out out/benchmarks.json

# The quick form of all experiments, and their pages in out/experiments/experiments.html.
experiments: $(VENV)/.developed
	$(BIN)/python -m experiments all --form quick --out out/experiments

# The compiled kernels under AddressSanitizer and UndefinedBehaviorSanitizer. Python itself leaks.
# `make sanitize SANITIZED="-n auto --ignore tests/browser tests gradtrace"` runs the whole suite so
# (Chromium does not start with the sanitizer preloaded).
SANITIZED ?= -p no:xdist $(wildcard tests/test_contraction_kernels.py tests/test_selection_kernels.py tests/test_low_rank_kernels.py tests/test_aggregate.py tests/test_pointers.py tests/test_plan_run.py)
sanitize: $(VENV)/.developed
	cmake -S . -B build/sanitize -DGRADTRACE_SANITIZE=ON
	cmake --build build/sanitize
	GRADTRACE_NATIVE=$(CURDIR)/build/sanitize/gradtrace_cpu.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	$(BIN)/python -m pytest -x $(SANITIZED)

# Wheels with the kernels inside, into dist/, for both machines or those in ARCHS; the other one's
# is cross-compiled (Debian: g++-aarch64-linux-gnu). The host's is installed where there is no
# compiler, and tested there.
wheel: $(VENV)/.developed
	$(BIN)/python .ci/wheels.py build $(ARCHS)
	$(BIN)/python .ci/wheels.py try dist/*manylinux*_$$(uname -m).whl

# The tests on many versions of torch and Python; writes docs/versions.md. See .ci/matrix.py.
matrix: $(VENV)/.developed
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/matrix .
	CELLS="$(CELLS)" FULL="$(FULL)" SAMPLE="$(SAMPLE)" CUDA="$(CUDA)" WORKERS="$(WORKERS)" KEEP="$(KEEP)" \
	$(BIN)/python .ci/matrix.py build/matrix/gradtrace-*.whl

# torch comes first and by version: a plain request for it would fetch gigabytes of CUDA. To keep
# a torch of your own, set TORCH to its version.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(PIP) "$(TORCH)"
	touch $@

SOURCES = pyproject.toml CMakeLists.txt $(wildcard gradtrace/kernels/cpu/*)

$(VENV)/.installed: $(VENV)/.torch $(SOURCES)
	$(PIP) --editable .
	touch $@

# What is installed already is not built again: only what developing needs comes on top.
$(VENV)/.developed: $(VENV)/.installed
	$(PIP) "gradtrace[dev]"
	touch $@

clean:
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
