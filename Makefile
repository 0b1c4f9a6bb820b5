# `make demo`: text from a real model. `make test`: all checks. Both build everything they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
NATIVE := $(wildcard src/ork/native/*.cpp src/ork/native/*.h src/ork/native/*.inl src/ork/emulator/preload/*.[ch]) CMakeLists.txt pyproject.toml

.PHONY: demo test test-slow test-arm test-native lint bench goldens clean env

# An editable install: Python runs from src/, the extension is built into it and rebuilt when its sources change.
env: $(VENV)/.built
$(VENV)/.built: $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]' -Ccmake.define.ORK_INPLACE=ON
	touch $@

demo: env
	$(BIN)/ork pull smollm2-135m
	$(BIN)/ork run smollm2-135m --chat -p 'What is the capital of France? Answer in one sentence.' -n 64

test: lint test-native test-arm
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow'

lint: env
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernels' own test binary, without Python: every instruction set of this machine against the portable one.
test-native: env
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/native-tests -DORK_PYTHON=OFF -DORK_TESTS=ON > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native-tests -j $(JOBS) > build/native-tests/log 2>&1 || { cat build/native-tests/log; exit 1; }
	build/native-tests/test_kernels

test-arm: test-native
	PATH="$(CURDIR)/$(BIN):$$PATH" sh tests/arm.sh

test-slow: env
	ORK_VOCABS=$$($(BIN)/python tests/text/fetch_vocabs.py) $(BIN)/python -m pytest -m slow

bench: env
	$(BIN)/python bench/kernels.py
	$(BIN)/python bench/startup.py
	$(BIN)/python bench/driver.py
	$(BIN)/python bench/emulator.py
	$(BIN)/python bench/emu_exec.py
	$(BIN)/python bench/peers.py --setup
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/streaming.py
	$(BIN)/python bench/memory_cap.py
	$(BIN)/python bench/moe.py
	$(BIN)/python bench/llamacpp_logits.py
	$(BIN)/python bench/quality_i8.py
	$(BIN)/python bench/quality.py
	$(BIN)/python bench/matmul_error.py
	$(BIN)/python bench/embedding.py
	$(BIN)/python bench/w4a4.py
	$(BIN)/python bench/conversion.py

goldens:
	$(PYTHON) -m venv build/goldens
	build/goldens/bin/pip install -q -r tests/goldens/requirements.txt
	build/goldens/bin/python tests/goldens/make_goldens.py

clean:
	rm -rf $(VENV) build src/ork/native/_core*.so src/ork/emulator/preload/*.so
