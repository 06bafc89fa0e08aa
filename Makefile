# What a developer types. `make help` lists it.
SHELL := /bin/bash
VENV ?= .venv
PY := $(VENV)/bin/python
JOBS ?= $(shell nproc)
# Test files run beside each other; the threads of one that wait leave the processor to another. A
# worker that crashes ends the run: xdist 3.8 replaces it and then waits for its file for ever.
WORKERS := $(shell n=$(JOBS); echo $$(( n < 4 ? n : 4 )))
BESIDE := OMP_WAIT_POLICY=passive $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --max-worker-restart=0
ROOM ?=
ARGS ?=

ROOMS := io kernels kernels_cuda fake_cuda store memory device methods engine public
STAMP := $(VENV)/.kvswap-setup
EDITABLE := $(VENV)/.kvswap-editable
NINJA := ninja -j$(JOBS)
SUB := $(MAKE) --no-print-directory
# As in the builds of cmake alone: one compiler cache serves all.
export KVSWAP_WERROR := ON
# One builder at a time in each build folder.
LOCK = mkdir -p build && flock build/.lock-$(1)
CPP_FILES := find csrc tests/cpp bench examples \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null
PY_FILES := kvswap_torch tuning tests bench tools examples docs setup.py

.DEFAULT_GOAL := help
.PHONY: help schema stubs setup build cpp-test torch-test py-test test demo bench quality docs docs-run lint format \
  wheel wheel-check golden clean locked-build locked-libraries locked-core locked-torch-test \
  libtorch-example locked-example test-aarch64 \
  cuda-compile cuda-report gpu-check gpu-prebuilt locked-cuda oldest-torch other-transformers \
  sanitize-address sanitize-thread \
  sanitize-short sanitize-short-thread sanitize-short-address sanitize-python locked-sanitize-python fuzz fuzz-short locked-fuzz faults soak soak-server

help:  ## list the targets
	@grep -hE '^[a-z0-9%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(STAMP)  ## Debian packages (root) and the pinned environment in .venv
$(STAMP): constraints.txt .ci/setup
	@.ci/setup $(VENV)

build: $(STAMP)  ## incremental build of the libraries into kvswap_torch/
	@$(call LOCK,dev) $(SUB) locked-build

locked-build: build/dev/build.ninja
	@$(NINJA) -C build/dev libraries config_probe faulty_kernel native_stack
	@$(SUB) $(EDITABLE)

# So that `.venv/bin/kvswap-tune` and `import kvswap_torch` work from any folder. Only into an
# environment of this tree's own: one that others use stays as it is.
$(EDITABLE): pyproject.toml setup.py
	@if [[ $$(realpath $(VENV)) == "$(CURDIR)"/* ]]; then \
	  KVSWAP_PREBUILT=1 $(PY) -m pip --disable-pip-version-check install -q --no-deps \
	    --no-build-isolation --editable . && touch $@; fi

build/dev/build.ninja:
	@cmake -S . -B build/dev -GNinja -DKVSWAP_INPLACE=ON \
	  -DPython_EXECUTABLE=$(abspath $(PY)) -DPython_FIND_VIRTUALENV=ONLY

cpp-test: $(STAMP)  ## torch-free build and ctest; ROOM=io for one room
	@$(call LOCK,core) $(SUB) locked-core DIR=build/core

# All that compiles is tested even when a room does not compile; the failure is kept.
locked-core:
	@test -f $(DIR)/build.ninja || cmake -S . -B $(DIR) -GNinja -DKVSWAP_BUILD_TORCH=OFF $(FLAGS)
	@built=0; $(NINJA) -C $(DIR) -k 0 $(addprefix test_,$(or $(ROOM),$(ROOMS))) || built=$$?; \
	$(UNDER) ctest --test-dir $(DIR) --output-on-failure -j$(JOBS) $(addprefix -L ,$(ROOM)) \
	  $(ARGS) && exit $$built

# Both in one build, which takes longer than the tests do.
sanitize-address: FLAGS := -DKVSWAP_SANITIZE=address,undefined
sanitize-thread: FLAGS := -DKVSWAP_SANITIZE=thread
# They need the address layout that kernels with much randomisation do not give.
PLAIN_LAYOUT := $(shell setarch -R true 2>/dev/null && echo setarch -R)
sanitize-address sanitize-thread: UNDER := $(PLAIN_LAYOUT)

sanitize-address: $(STAMP)  ## torch-free tests under Address- and UndefinedBehaviorSanitizer
sanitize-thread: $(STAMP)  ## torch-free tests under ThreadSanitizer
sanitize-address sanitize-thread:
	@$(call LOCK,$@) $(SUB) locked-core DIR=build/$@ FLAGS="$(FLAGS)" UNDER="$(UNDER)"

# What finds most for its time: threads and memory of I/O and store, and files from outside.
QUICKLY := -DKVSWAP_SANITIZE_OPTIONS=-O0
SHORT_ROOMS := io store methods engine public
SHORT_THREAD := -DKVSWAP_SANITIZE=thread $(QUICKLY) -DKVSWAP_SANITIZE_ROOMS='io|store' \
  -DKVSWAP_TEST_FILES='test_read.*|test_write_queue|test_kept_memory|test_faulty_kernel|test_record_store'
SHORT_ADDRESS := -DKVSWAP_SANITIZE=address,undefined $(QUICKLY) \
  -DKVSWAP_SANITIZE_ROOMS='io|store|methods|engine|public' \
  -DKVSWAP_TEST_FILES='test_read_.*|test_write_queue|test_kept_memory|test_wiping|test_faulty_kernel|test_record_store|test_extent.*|test_pool_layout|test_files|test_keep.*|test_cluster_.*|test_query_window|test_top_overlap'
FUZZ_SECONDS ?= 60
FUZZ_FILES ?= 20000
FUZZ_SEED ?= 1
CLANG := $(shell command -v clang++ || true)
# Without libFuzzer in the build of sanitize-short: instrumented alike.
FUZZ_IN := short-address
FUZZ_FLAGS = $(SHORT_ADDRESS)
ifneq ($(CLANG),)
FUZZ_IN := fuzz
FUZZ_FLAGS = -DKVSWAP_SANITIZE=address,undefined -DKVSWAP_SANITIZE_ROOMS='io|store|public' \
  -DCMAKE_CXX_COMPILER=$(CLANG) -DCMAKE_CXX_FLAGS=-fsanitize=fuzzer-no-link
endif

# Of the settings that clusters live under, others have nearly these among theirs.
SELDOM := Lives/.*/mass
SHORT_TEST = ROOMS="$(SHORT_ROOMS)" \
  ARGS="-L '$(subst $() ,|,$(SHORT_ROOMS))' -E '$(SELDOM)'"
HAS_PLAIN_LAYOUT = [[ -n '$(PLAIN_LAYOUT)' || $$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 32) -le 28 ]]

# LeakSanitizer stops where a container forbids ptrace.
CHECKS_LEAKS = mkdir -p build && echo 'int main() {}' | \
  g++ -fsanitize=address -x c++ -o build/leak-check - && build/leak-check 2>/dev/null

sanitize-short: sanitize-short-thread sanitize-short-address  ## a part under each, short fuzzing

sanitize-short-address: $(STAMP)  ## readers, queue, store, files from outside under ASan and UBSan
	@$(CHECKS_LEAKS) || export ASAN_OPTIONS=detect_leaks=0; \
	if $(HAS_PLAIN_LAYOUT); then \
	  $(call LOCK,short-address) $(SUB) locked-core DIR=build/short-address $(SHORT_TEST) \
	    FLAGS="$(SHORT_ADDRESS)" UNDER="$(PLAIN_LAYOUT)" && \
	  $(call LOCK,short-address) $(SUB) locked-fuzz DIR=build/short-address FUZZ_SECONDS=3 \
	    UNDER="$(PLAIN_LAYOUT)"; \
	else echo "sanitize-short: no AddressSanitizer, since setarch -R is refused here"; \
	  $(SUB) fuzz-short; fi

sanitize-short-thread: $(STAMP)  ## readers, write queue and store under ThreadSanitizer
	@if $(HAS_PLAIN_LAYOUT); then \
	  $(call LOCK,short-thread) $(SUB) locked-core DIR=build/short-thread $(SHORT_TEST) \
	    FLAGS="$(SHORT_THREAD)" UNDER="$(PLAIN_LAYOUT)"; \
	else echo "sanitize-short: no ThreadSanitizer, since setarch -R is refused here"; fi

sanitize-python: $(STAMP)  ## sessions and caches of Python over libraries under ASan and UBSan
	@$(call LOCK,sanitize-python) $(SUB) locked-sanitize-python

# A subprocess without the preloaded runtime could not load the libraries. Files are copied: the
# package looks for its libraries beside the file that a link stands for.
PRELOADED = LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
  ASAN_OPTIONS=detect_leaks=0
SANITIZED_TESTS ?= tests/python/test_session.py tests/python/test_hf_cache.py
locked-sanitize-python:
	@test -f build/sanitize-python/build.ninja || cmake -S . -B build/sanitize-python -GNinja \
	  -DKVSWAP_BUILD_TESTS=OFF -DPython_EXECUTABLE=$(abspath $(PY)) -DPython_FIND_VIRTUALENV=ONLY \
	  -DKVSWAP_SANITIZE=address,undefined $(QUICKLY) \
	  -DKVSWAP_SANITIZE_ROOMS='io|store|memory|device|methods|engine|public'
	@$(NINJA) -C build/sanitize-python libraries
	@cd build/sanitize-python/kvswap_torch && for part in $(CURDIR)/kvswap_torch/*; do \
	  case $$part in *.so|*/lib|*/include|*/share) ;; \
	    *) if [[ -d $$part ]]; then ln -sfn $$part .; else cp --remove-destination $$part .; fi ;; \
	  esac; done
	$(PRELOADED) $(PY) -m pytest -q -o pythonpath="build/sanitize-python . tests" \
	  $(SANITIZED_TESTS) $(ARGS)

fuzz-short: $(STAMP)  ## fuzz targets for seconds, in the build of the tests
	@$(call LOCK,core) $(SUB) locked-fuzz DIR=build/core FUZZ_SECONDS=3

fuzz: $(STAMP)  ## fuzz targets, FUZZ_SECONDS=60 each; files that Python and C++ must judge alike
	@$(call LOCK,$(FUZZ_IN)) $(SUB) locked-fuzz DIR=build/$(FUZZ_IN) FLAGS="$(FUZZ_FLAGS)" \
	  UNDER="$(PLAIN_LAYOUT)"
	@$(SUB) build
	KVSWAP_TEST_MUTATIONS=$(FUZZ_FILES) KVSWAP_TEST_SEED=$(FUZZ_SEED) \
	  $(PY) -m pytest -q tests/python/test_files_differ.py

# A finding is left in the build folder, as ./fuzz-finding or libFuzzer's crash-*.
locked-fuzz:
	@test -f $(DIR)/build.ninja || cmake -S . -B $(DIR) -GNinja -DKVSWAP_BUILD_TORCH=OFF $(FLAGS)
	@$(NINJA) -C $(DIR) fuzz_targets
	@cd $(DIR) && for target in tests/cpp/fuzz/fuzz_*; do \
	  if [[ -x $$target && -f $$target ]]; then \
	    mkdir -p corpus/$${target##*/fuzz_} && \
	    $(UNDER) ./$$target -max_total_time=$(FUZZ_SECONDS) -seed=$(FUZZ_SEED) corpus/$${target##*/fuzz_} \
	      $(CURDIR)/tests/cpp/fuzz/corpus/$${target##*/fuzz_} || exit 1; fi; done

faults: $(STAMP)  ## the fault matrix in full, into docs/faults.md; real disks that fill up (root)
	@$(call LOCK,core) $(SUB) locked-core DIR=build/core ROOM=engine ARGS="-E ."
	@rm -f build/fault_table && KVSWAP_FAULT_TABLE=$(CURDIR)/build/fault_table \
	  build/core/tests/cpp/test_engine --gtest_filter='*FaultMatrix*' --gtest_brief=1
	@$(PY) -m tests.fault_table build/fault_table docs/faults.md
	@$(SUB) build
	KVSWAP_TEST_ALL_DISKS=1 $(PY) -m pytest -q tests/python/test_real_disks.py

.PHONY: saved-models
saved-models: build  ## every model's cache saved and opened in another process; 50 kills
	KVSWAP_TEST_ALL_SAVED=1 $(PY) -m pytest -q tests/python/test_saving_every_model.py \
	  tests/python/test_saving_kills.py

.PHONY: presets-matrix
presets-matrix: build  ## every preset through generate(), saved, forked and served
	KVSWAP_TEST_LONG=1 KVSWAP_TEST_ALL_PRESETS=1 $(PY) -m pytest -q tests/python/test_presets_generate.py \
	  tests/python/test_presets_kept.py

SOAK_SECONDS ?= 3600
soak: build  ## random caches, lengths and faults in one process, SOAK_SECONDS=3600
	$(PY) -m tests.soak --seconds $(SOAK_SECONDS)

soak-server: build  ## a server under clients, folders, disks and kills, SOAK_SECONDS=3600
	$(PY) -m tests.python.test_serving_disks --seconds $$(( $(SOAK_SECONDS) / 4 ))
	$(PY) -m tests.python.test_serving_soak --seconds $$(( $(SOAK_SECONDS) * 3 / 4 ))

# Not in `make test`: an emulator takes minutes.
test-aarch64: FLAGS := --toolchain cmake/aarch64.cmake
test-aarch64: $(STAMP)  ## torch-free tests cross-built for 64-bit Arm, run by qemu-user
	@.ci/aarch64
	@$(call LOCK,aarch64) $(SUB) locked-core DIR=build/aarch64 FLAGS="$(FLAGS)"
	@echo "What was skipped, and why (qemu-user has no io_uring):"
	@grep -h -A1 ': Skipped$$' build/aarch64/Testing/Temporary/LastTest.log | \
	  grep -v -e ': Skipped$$' -e '^--' | sed -E "s/'[^']*'/a folder/" | sort | uniq -c

libtorch-example: build  ## the C++ program of examples/libtorch, against what a wheel installs
	@$(call LOCK,dev) $(SUB) locked-example

locked-example:
	@cmake --install build/dev --prefix build/libtorch/kvswap > build/libtorch.log
	@test -f build/libtorch/build.ninja || cmake -S examples/libtorch -B build/libtorch -GNinja \
	  -DCMAKE_PREFIX_PATH="$(CURDIR)/build/libtorch/kvswap/share/cmake;$(shell $(PY) -c \
	  'import torch; print(torch.utils.cmake_prefix_path)')" > build/libtorch.log
	@$(NINJA) -C build/libtorch

cuda-compile: $(STAMP)  ## CUDA kernels for three architectures, and the glue's syntax; needs nvcc
	@$(call LOCK,core) $(SUB) locked-cuda

GLUE_CHECK := g++ -std=c++20 -fsyntax-only -Wall -Wextra -Werror -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE
locked-cuda:
	@cmake -S . -B build/core -GNinja -DKVSWAP_BUILD_TORCH=OFF >build/core.cmake.log || \
	  { cat build/core.cmake.log; exit 1; }
	@nvcc=$$(sed -n 's/^KVSWAP_NVCC:FILEPATH=//p' build/core/CMakeCache.txt); \
	if [[ ! -x $$nvcc ]]; then echo "cuda-compile: skipped, there is no nvcc"; exit 0; fi; \
	$(NINJA) -C build/core cuda_objects && \
	torch=$$($(PY) -c 'import torch; print(torch.__path__[0])')/include && \
	for glue in csrc/torch/cuda/*.cpp csrc/device/cuda/*.cpp; do \
	  $(GLUE_CHECK) -Icsrc -isystem $$torch -isystem $$torch/torch/csrc/api/include \
	    -isystem $$(dirname $$(dirname $$(readlink -f $$nvcc)))/include $$glue || exit 1; \
	done

# CI must have what is fetched; elsewhere a lane that cannot have it says so, and the others run.
MAY_SKIP = $(if $(CI),,--may-skip)

oldest-torch: $(STAMP)  ## syntax against the oldest promised torch's headers: 80 MB fetched once
	@$(call LOCK,oldest-torch) $(PY) -m tests.packaging.oldest_torch oldest $(ARGS)

.PHONY: newest-torch
newest-torch: $(STAMP)  ## the same against the newest torch that was tested: 139 MB fetched once
	@$(call LOCK,oldest-torch) $(PY) -m tests.packaging.oldest_torch newest $(ARGS)

other-transformers: build  ## one test file on the oldest and the newest transformers: 25 MB fetched once
	@$(call LOCK,other-transformers) $(PY) -m tests.packaging.other_transformers $(ARGS)

.PHONY: version-matrix
version-matrix: build  ## every torch with every transformers, gigabytes and an hour; ARGS="--plan" says it all
	@$(call LOCK,version-matrix) $(PY) -m tests.packaging.version_matrix $(ARGS)

cuda-report: cuda-compile  ## registers, spills, warps and loads of every CUDA kernel, against those recorded
	@$(PY) -m tests.gpu.report $(ARGS)

gpu-check:  ## on a machine with a GPU: build, tests/gpu, benchmarks, the demo (ARGS="--help")
	@python3 -m tests.gpu.check $(ARGS)

gpu-prebuilt: $(STAMP)  ## libraries for a machine with a GPU, made here into .gpu (ARGS="--help")
	@$(call LOCK,gpu-prebuilt) $(PY) -m tests.gpu.prebuilt $(ARGS)

torch-test: build  ## GoogleTest of the C++ session over tensors
	@$(call LOCK,dev) $(SUB) locked-torch-test

locked-torch-test:
	@$(NINJA) -C build/dev test_torch
	@ctest --test-dir build/dev --output-on-failure -L torch $(ARGS)

py-test: build  ## build, then pytest; ARGS="tests/python/test_config.py -k save"
	$(PY) -m pytest -q $(ARGS)

.PHONY: other-sums
other-sums: build  ## choices compared with the sums of other processors; ARGS="--threads 4 FILES"
	@$(PY) -m tests.other_processors $(ARGS)

test: $(STAMP)  ## set-up, linters, build, ctest, pytest, wheel: what CI runs
	@$(SUB) lint
	@$(SUB) cpp-test
	@$(PY) -m tests.known_skips build/core/Testing/Temporary/LastTest.log
	@$(SUB) sanitize-short
	@$(SUB) cuda-compile
	@$(SUB) oldest-torch ARGS=$(MAY_SKIP)
	@$(SUB) newest-torch ARGS=--may-skip
	@$(SUB) torch-test
	@$(SUB) libtorch-example
	KVSWAP_KNOWN_SKIPS=1 $(BESIDE) $(ARGS)
	@$(SUB) other-transformers ARGS=$(MAY_SKIP)
	@$(SUB) other-sums ARGS=
	@$(SUB) wheel-check
	@$(SUB) core-check
	@$(SUB) docs

# One process for each processor: the time limit of a single test is not meant for these.
LONG_ROOMS := engine fake_cuda
.PHONY: test-long
test-long: build  ## all that tests/how_long.py and .h leave out of make test: random lives, faults, combinations
	@$(call LOCK,core) $(SUB) locked-core DIR=build/core ARGS="-E ."
	for room in $(LONG_ROOMS); do \
	  for part in $$(seq 0 $$(( $(JOBS) - 1 ))); do echo $$room $$part; done; done | \
	  KVSWAP_TEST_LONG=1 GTEST_TOTAL_SHARDS=$(JOBS) xargs -P $(JOBS) -L1 sh -c \
	  'GTEST_SHARD_INDEX=$$1 exec build/core/tests/cpp/test_$$0 --gtest_brief=1'
	KVSWAP_TEST_LONG=1 $(BESIDE) $(ARGS)

demo:  ## a long document answered from a KV cache on disk, next to the full cache
	@.ci/plan $(VENV)
	@$(SUB) $(STAMP)
	@$(call LOCK,dev) $(SUB) locked-libraries
	$(PY) -m examples.demo $(ARGS)

# Without what tests alone want.
locked-libraries: build/dev/build.ninja
	@$(NINJA) -C build/dev libraries
	@$(SUB) $(EDITABLE)

.PHONY: texts
texts:  ## manuals that the reference model is trained on and bench/ reads: Debian packages (root)
	@.ci/texts

# The packages that the conversion needs are not in `make setup`.
.PHONY: real-model locked-real-model
REAL_MODEL ?= build/models/smollm2
real-model: $(STAMP)  ## a small real chat model as judge: 93 MB fetched once, 274 MB in build/models
	@$(call LOCK,real-model) $(SUB) locked-real-model

locked-real-model:
	@$(PY) -m tools.real_model.make $(REAL_MODEL)

bench: build  ## speed: KV on disk beside its peers (ARGS="--help" tells all), then the reader
	$(PY) -m bench side_by_side $(ARGS)
	$(PY) -m bench reader

# With gcc, ggml's sums over AVX512-FP16 are not in vectors; without it they are.
ifeq ($(shell uname -m),x86_64)
PEERS_FLAGS := -mno-avx512fp16
endif
.PHONY: peers
peers: $(STAMP)  ## llama.cpp and oLLM for `make bench`, built for this processor; some 10 minutes
	CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_C_FLAGS=$(PEERS_FLAGS) -DCMAKE_CXX_FLAGS=$(PEERS_FLAGS)" \
	  $(PY) -m pip --disable-pip-version-check install -q --no-binary llama-cpp-python \
	  -r bench/side_by_side/peers.txt
	$(PY) -m pip --disable-pip-version-check install -q --no-deps -r bench/side_by_side/peers_alone.txt

# Tensors of tens of MiB come and go: without this each is mapped and cleared anew.
QUALITY_MALLOC := MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648

quality: build  ## which method finds what the full cache finds; ARGS="--help" tells all
	$(QUALITY_MALLOC) $(PY) -m bench quality $(ARGS)

golden: build  ## tokens, choices, bytes, counters of 59 runs; ARGS="--against FILE" compares
	$(PY) -m tests.golden build/golden.json $(ARGS)

.PHONY: first-hour
first-hour: $(STAMP)  ## new users type what docs/first-hour says; ARGS="laptop --debian bookworm" as root: a bare one
	@$(call LOCK,first-hour) $(PY) -m tests.first_hour $(ARGS)

docs-run: $(STAMP)  ## the shell blocks of README and docs/, in a fresh clone; minutes
	@$(PY) -m tests.packaging.run_docs

docs: $(STAMP)  ## the pages of docs/ and the API reference, into build/docs; a broken link fails
	@mkdir -p build && $(VENV)/bin/mkdocs build > build/docs.log 2>&1 || { cat build/docs.log; exit 1; }

lint: $(STAMP)  ## ruff, mypy and clang-format, changing nothing
	@$(VENV)/bin/ruff check -q --output-format concise $(wildcard $(PY_FILES))
	@$(VENV)/bin/ruff format --check $(wildcard $(PY_FILES))
	@$(PY) -m mypy --no-error-summary
	@$(CPP_FILES) | xargs -0 -r $(VENV)/bin/clang-format --dry-run -Werror

format: $(STAMP)  ## rewrite the sources as ruff and clang-format want them
	@$(VENV)/bin/ruff check --fix $(wildcard $(PY_FILES)); true
	@$(VENV)/bin/ruff format $(wildcard $(PY_FILES))
	@$(CPP_FILES) | xargs -0 -r $(VENV)/bin/clang-format -i

schema: $(STAMP)  ## write the JSON Schema, docs/settings.md and the C++ settings from the fields
	@$(PY) -c 'from kvswap_torch.config.settings_page import page; print(page(), end="")' \
	  > docs/settings.md
	@$(PY) -c 'import json; from kvswap_torch.config.json_schema import schema; \
	  print(json.dumps(schema(), indent=2))' > kvswap_torch/config.schema.json
	@$(PY) -c 'from kvswap_torch.config import cpp_codegen; print(cpp_codegen.settings(), end="")' \
	  | $(VENV)/bin/clang-format > csrc/kvswap/settings.h
	@$(PY) -c 'from kvswap_torch.config import cpp_codegen; print(cpp_codegen.rules(), end="")' \
	  | $(VENV)/bin/clang-format > csrc/kvswap/settings_rules.h

stubs: build  ## write the types of the C++ extension, kvswap_torch/_C.pyi
	@$(PY) -m pybind11_stubgen kvswap_torch._C -o build/stubs > build/stubs.log 2>&1 || \
	  { cat build/stubs.log; exit 1; }
	@cp build/stubs/kvswap_torch/_C.pyi kvswap_torch/_C.pyi

wheel: $(STAMP)  ## build a wheel into dist/
	@$(call LOCK,wheel) $(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .

wheel-check: $(STAMP)  ## build the wheel, install it, import it, link a C++ program to it
	@$(call LOCK,wheel) $(PY) -m tests.packaging.check_wheel

.PHONY: core-check
core-check: $(STAMP)  ## a program built against the torch-free library, by CMake and pkg-config; ARGS=--conan
	@$(call LOCK,core) $(PY) -m tests.packaging.check_core $(ARGS)

.PHONY: wheels wheels-check sdist
sdist: $(STAMP)  ## the source distribution, into dist/
	@mkdir -p dist && $(PY) -c 'import sys; sys.path.insert(0, "tools"); import build_backend; \
	  print(build_backend.build_sdist("dist"))' | tail -1

wheels: $(STAMP)  ## wheels for Python 3.11 to 3.14, manylinux_2_28; ARGS="--architecture x86_64 aarch64"
	@$(call LOCK,wheels) $(PY) -m tools.wheels $(ARGS)

wheels-check: $(STAMP)  ## their tags and contents, README's lines without a compiler; ARGS="--bare 3.12"
	@$(PY) -m tests.packaging.check_wheels $(ARGS)

.PHONY: release
release: $(STAMP)  ## check tree, changelog, tags, tests and docs, then set the tag; VERSION=0.2.0
	@$(PY) -m tools.release $(VERSION)

clean:  ## remove what was built, not .venv
	rm -rf build dist kvswap_torch/lib kvswap_torch/include kvswap_torch/share \
	  kvswap_torch/_C*.so *.egg-info
