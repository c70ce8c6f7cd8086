# gpt2-sla. `make help` lists the targets; the two that do everything are `make train` and `make test`.

CXX      ?= g++
CXXSTD   := -std=c++17
WARNINGS := -Wall -Wextra
# No -ffast-math: NaN and infinity must stay what they are. These two only give up errno and floating-point traps.
OPTIMIZE := -O3 -march=native -fno-math-errno -fno-trapping-math -ffp-contract=fast
ifdef DEBUG
OPTIMIZE := -O1 -g -march=native -DSLA_DEBUG
endif
CPPFLAGS += -I. $(addprefix -I,$(INCLUDES))
CXXFLAGS += $(CXXSTD) $(WARNINGS) $(OPTIMIZE) -fopenmp

BUILD := build
# Host code that includes heavy headers (JSON, command line) is compiled by itself, once, whatever the device.
HOST_OBJS := $(addprefix $(BUILD)/,options.o config_json.o model_io.o checkpoint.o logger.o durable_file.o safetensors.o)
TEST_NAMES := $(basename $(notdir $(wildcard dev/test/test_*.cpp))) test_gpt2_sla_cpu
TESTS := $(addprefix $(BUILD)/,$(TEST_NAMES))

# What this machine has.
have = $(shell command -v $(1) >/dev/null 2>&1 && echo yes)
have_header = $(shell printf '\043include <%s>\n' $(1) | $(CXX) $(CXXSTD) $(CPPFLAGS) -E -x c++ - >/dev/null 2>&1 && echo yes)
found = $(if $(1),found,not found)

.PHONY: all help train test planted-bugs bench-cpu fuzz clean setup programs what-is-here
.DELETE_ON_ERROR:
.SECONDARY:

all: what-is-here programs

help:
	@echo 'make            build what this machine can build, and say what it is'
	@echo 'make train      install, build, fetch a corpus, train a small model on it and sample (about 5 minutes on 2 cores)'
	@echo '                TEXT=path: your own text file or folder; STEPS=n: train longer; DATA=tinyshakespeare'
	@echo 'make test       install, build and run the tests; the last line says how many passed'
	@echo 'make bench-cpu  speed of GPT-2 124M and of long sequences on the CPU, with and without skip-layer attention'
	@echo 'make planted-bugs  can the tests fail? plants bugs in a copy, one by one (about 20 minutes)'
	@echo 'make fuzz       feed broken safetensors files to the reader, with sanitizers, for SECONDS=60'
	@echo 'make setup      only install the packages that are missing (scripts/setup.sh)'
	@echo 'make clean      remove what was built; corpora in data/ and runs in runs/ stay'
	@echo 'DEBUG=1         with any of them: unoptimised, with debug information, activations filled with NaN'

what-is-here:
	@echo 'nvcc     $(call found,$(call have,nvcc))'
	@echo 'GPU      $(if $(shell nvidia-smi -L 2>/dev/null),$(shell nvidia-smi -L 2>/dev/null | head -1),not found)'
	@echo 'MPI      $(call found,$(call have,mpirun))'
	@echo 'oneDNN   $(call found,$(call have_header,dnnl.h))'
	@echo 'builds:  train_gpt2_sla_cpu, data/tokenize'
	@echo 'leaves out: train_gpt2_sla (GPU; its operations are not written yet) and, with it, the use of nvcc, GPU and MPI'
	@scripts/setup.sh --check build

programs: train_gpt2_sla_cpu data/tokenize

setup:
	@scripts/setup.sh build test

train:
	@scripts/train.sh

test:
	@scripts/setup.sh build test
	@$(MAKE) --no-print-directory -j$(shell nproc) programs $(TESTS) $(BUILD)/fuzz_safetensors
	@scripts/run_tests.sh $(TESTS)

planted-bugs:
	@scripts/setup.sh build test
	@dev/test/planted_bugs.sh

bench-cpu:
	@scripts/setup.sh build
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/bench_cpu
	@$(BUILD)/bench_cpu

SECONDS ?= 60
fuzz:
	@scripts/setup.sh build
	@$(MAKE) --no-print-directory -j$(shell nproc) $(BUILD)/fuzz_safetensors
	$(BUILD)/fuzz_safetensors $(SECONDS) $$RANDOM

clean:
	rm -rf $(BUILD) train_gpt2_sla_cpu data/tokenize

# ----------------------------------------------------------------------------
# Programs

# Rebuild everything when the compiler or its flags change (DEBUG=1, say).
$(BUILD)/flags: force
	@mkdir -p $(BUILD)
	@echo '$(CXX) $(CPPFLAGS) $(CXXFLAGS)' | cmp -s - $@ || echo '$(CXX) $(CPPFLAGS) $(CXXFLAGS)' > $@
.PHONY: force
force:

COMPILE = $(CXX) $(CPPFLAGS) $(CXXFLAGS) -MMD -MP -MF $(BUILD)/$(@F).d
ONEDNN := -ldnnl
GTEST := -lgtest -lgtest_main -lpthread

$(BUILD)/%.o: llmc/%.cpp $(BUILD)/flags
	$(COMPILE) -c $< -o $@

train_gpt2_sla_cpu: train_gpt2_sla.cu $(HOST_OBJS) $(BUILD)/flags
	$(COMPILE) -x c++ $< -x none $(HOST_OBJS) $(ONEDNN) -o $@

data/tokenize: data/tokenize.cpp $(BUILD)/durable_file.o $(BUILD)/flags
	$(COMPILE) $< $(BUILD)/durable_file.o -o $@

$(BUILD)/test_gpt2_sla_cpu: test_gpt2_sla.cu $(HOST_OBJS) $(BUILD)/flags
	$(COMPILE) -x c++ $< -x none $(HOST_OBJS) $(ONEDNN) $(GTEST) -o $@

# These need headers alone.
$(BUILD)/test_plan $(BUILD)/test_ops: $(BUILD)/%: dev/test/%.cpp $(BUILD)/flags
	$(COMPILE) $< $(ONEDNN) $(GTEST) -o $@

$(BUILD)/test_%: dev/test/test_%.cpp $(HOST_OBJS) $(BUILD)/flags
	$(COMPILE) $< $(HOST_OBJS) $(ONEDNN) $(GTEST) -o $@

$(BUILD)/bench_cpu: dev/bench/bench_cpu.cpp $(HOST_OBJS) $(BUILD)/flags
	$(COMPILE) $< $(HOST_OBJS) $(ONEDNN) -o $@

$(BUILD)/fuzz_safetensors: dev/test/fuzz_safetensors.cpp llmc/safetensors.cpp llmc/safetensors.h llmc/error.h
	@mkdir -p $(BUILD)
	$(CXX) $(CPPFLAGS) $(CXXSTD) $(WARNINGS) -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -DSTANDALONE_FUZZER dev/test/fuzz_safetensors.cpp llmc/safetensors.cpp -o $@

-include $(wildcard $(BUILD)/*.d)
