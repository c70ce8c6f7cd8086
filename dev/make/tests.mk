# How tests, benchmarks and the emulated GPU are built, and which tests there are.

# The emulated GPU: g++ compiles the same sources against dev/emu's headers, and the sanitizers check every access.
# -fsanitize-recover=address and no functions that check accesses, however many there are in a kernel: dev/emu/
# shared_memory.cpp is called for what is poisoned, and ends the program if it is an error.
# With -O2 it takes twice as long to compile, and the tests run no faster. -g1 is enough for stack traces with lines; -g
# would take nearly twice as long as well, for the places of variables in optimized code.
EMU_OPTIMIZE := -O1 -g1
EMUFLAGS := $(CXXSTD) $(WARNINGS) $(KEEP_GARBAGE) -Wno-unknown-pragmas $(EMU_OPTIMIZE) -march=native -fno-math-errno \
  -ffp-contract=fast -fopenmp -fsanitize=address,alignment -fno-sanitize-recover=all \
  -fsanitize-recover=address --param asan-instrumentation-with-call-threshold=2147483647 -DSLA_EMU -DSLA_NCCL \
  -Idev/emu/include

EMU_OBJS := $(patsubst %.cpp,$(EMU_OBJ)/%.o,$(wildcard dev/emu/*.cpp dev/emu/ptx/*.cpp))

# Tests of host code; and tests of the model and its operations, on the CPU's and on the emulated GPU's.
HOST_TESTS := $(patsubst dev/test/%.cpp,$(BUILD)/%,$(wildcard dev/test/test_*.cpp))
OPERATIONS_TESTS := test_ops test_attention test_tile
DEVICE_TESTS := test_gpt2_sla test_ops test_attention
EMU_TESTS := $(foreach t,$(DEVICE_TESTS),$(foreach p,bf16 fp16 fp32,$(BUILD)/$(p)/$(t)_emu)) \
  $(BUILD)/bf16/test_tile_emu $(BUILD)/fp16/test_tile_emu $(BUILD)/bf16/test_memory_emu
CPU_TESTS := $(foreach t,$(DEVICE_TESTS),$(BUILD)/bf16/$(t)_cpu $(BUILD)/fp32/$(t)_cpu)
# They are started in this order: those that take longest first.
FIRST_TESTS := $(addprefix $(BUILD)/,\
  test_huggingface test_arm64 bf16/test_gpt2_sla_emu fp32/test_gpt2_sla_emu test_cli test_dist test_scripts \
  test_gpu_check test_machine_code test_faults test_resume test_terms test_loss_scaling test_bad_input test_ptx \
  test_reference test_data)
TESTS := $(FIRST_TESTS) $(filter-out $(FIRST_TESTS),$(EMU_TESTS) $(CPU_TESTS) $(HOST_TESTS))
# `make test` leaves these out: all of their tests take long, they or what they run take long to compile, or they find
# little that the same program in the other precision does not. Of all others it runs the tests whose names do not begin
# with Long.
LATER_TESTS := $(filter $(BUILD)/test_emu%,$(HOST_TESTS)) $(filter $(BUILD)/fp16/%,$(EMU_TESTS)) \
  $(addprefix $(BUILD)/,\
  test_amx test_arm64 test_dist test_evaluate test_faults test_formats test_gpu_check \
  test_hostile test_huggingface test_loss_scaling test_machine_code test_mutants test_ptx test_reference test_scripts \
  bf16/test_gpt2_sla_cpu \
  bf16/test_gpt2_sla_emu bf16/test_memory_emu \
  bf16/test_attention_cpu fp32/test_attention_cpu fp32/test_attention_emu bf16/test_ops_cpu fp32/test_ops_cpu \
  bf16/test_ops_emu fp32/test_ops_emu)
QUICK_TESTS := $(filter-out $(LATER_TESTS),$(TESTS))
# What CI leaves out of the products of shapes, wirings and precisions. PART=k/n: of the tests of these programs every
# n-th is run, from the k-th on. LEAVE_OUT: fp32, bf16 or fp16, no tests of that precision, but test_loss_scaling and
# test_tile, which test_ptx runs as well; arm64 and the like, not test_arm64, nor what it alone runs. SKIP: no tests
# that this filter of GoogleTest's matches.
SHARDED_TESTS := $(EMU_TESTS) $(CPU_TESTS) $(addprefix $(BUILD)/,test_amx test_dist test_ptx test_reference)
# Other goals leave both alone: an exported PART may be data/linux.sh's.
ifneq ($(filter test-all list-tests,$(MAKECMDGOALS)),)
ifneq ($(PART),)
ifeq ($(shell echo '$(PART)' | awk -F/ '/^[0-9]+\/[0-9]+$$/ && $$1 > 0 && $$1 <= $$2'),)
$(error PART=$(PART): it must be k/n, such as 2/3)
endif
endif
ifneq ($(filter-out fp32 bf16 fp16 $(TESTS:$(BUILD)/test_%=%),$(LEAVE_OUT)),)
$(error LEAVE_OUT=$(LEAVE_OUT): it must be of fp32, bf16, fp16 and what follows test_ in the tests of host programs)
endif
endif
LEFT_OUT := $(filter-out %/test_tile_emu,\
  $(filter $(LEAVE_OUT:%=$(BUILD)/%/%) $(LEAVE_OUT:%=$(BUILD)/test_%),$(TESTS)) \
  $(if $(filter bf16,$(LEAVE_OUT)),$(BUILD)/test_amx))
# What tests run: some alone, and all of them.
programs_of.amx := emulated_amx.so onednn_cpuid.txt
programs_of.cli := bf16/train_gpt2_sla_emu
programs_of.dist := emu_ranks bf16/train_gpt2_sla_emu
programs_of.evaluate := fp32/evaluate_gpt2_sla_emu
programs_of.gpu_check := bf16/bench_gpu_emu bf16/train_gpt2_sla_emu bf16/gpu_model
programs_of.loss_scaling := fp16/train_gpt2_sla_emu
TESTED_PROGRAMS := report experiment data/tokenize data/convert data/probe $(addprefix $(BUILD)/,\
  $(PROGRAMS:%=fp32/%_cpu) bf16/train_gpt2_sla_cpu fp32/train_gpt2_sla_emu fp32/bench_cpu fuzz_safetensors mutants \
  $(sort $(foreach t,$(filter-out $(LEAVE_OUT),amx cli dist evaluate gpu_check loss_scaling),$(programs_of.$(t)))))
# What the tests of `make test` run.
QUICK_TESTED_PROGRAMS := $(PROGRAMS:%=$(BUILD)/fp32/%_cpu) report experiment \
  data/tokenize data/convert data/probe

# Said before anything is compiled.
GPU_GOALS := $(PROGRAMS) test_gpt2_sla gpu-checked gpu-bundle \
  $(foreach p,bf16 fp16 fp32,$(addprefix $(BUILD)/$(p)/,$(PROGRAMS) $(DEVICE_TESTS) $(OPERATIONS_TESTS) bench_gpu))
ifneq ($(and $(gpu_problem),$(filter $(GPU_GOALS),$(MAKECMDGOALS))),)
$(error $(firstword $(filter $(GPU_GOALS),$(MAKECMDGOALS))): $(gpu_problem))
endif

# ----------------------------------------------------------------------------
# The tests of one file of operations, by dev/test/kernels.txt, on ON=cpu, emu or gpu.

ON := emu
kernel_precision = $(if $(filter cpu,$(ON)),$(cpu_precision),$(gpu_precision))
.PHONY: test-kernel
test-kernel:
	@set -f; set -- $$(sed -n 's|^$(notdir $(or $(FILE),none)) ||p' dev/test/kernels.txt); \
	  case $$#$(ON) in 2cpu|2emu) name=$$1_$(ON) ;; 2gpu) name=$$1 ;; \
	  *) echo 'error: test-kernel: FILE: one of dev/test/kernels.txt, such as llmc/cuda/gru.h; ON: cpu, emu or gpu' >&2; \
	    exit 1 ;; esac; \
	  case $$1 in test_makefile) program=$(BUILD)/$$1 ;; *) program=$(BUILD)/$(kernel_precision)/$$name ;; esac; \
	  set -x; $(MAKE) --no-print-directory $$program && $$program --gtest_filter="$$2"

# ----------------------------------------------------------------------------
# Host tests

$(BUILD)/mutants: $(OBJ)/dev/test/mutants.o $(BUILD)/flags
	$(CXX) $(cxxflags) $(filter %.o,$^) -lpthread -o $@

$(BUILD)/test_corpus $(BUILD)/test_text_files $(BUILD)/test_emu_triton: GTEST += -larchive -lz
$(BUILD)/test_corpus: $(OBJ)/data/shards.o
$(BUILD)/test_vocabulary: $(OBJ)/data/vocabulary.o
$(BUILD)/test_text_files: $(OBJ)/data/archive_stream.o
$(BUILD)/test_%: $(OBJ)/dev/test/test_%.o $(REPORT_LIB) $(HOST_LIB) $(BUILD)/flags
	$(CXX) $(cxxflags) $(filter %.o %.a,$^) $(MPI_LIBS) $(GTEST) -o $@

# ----------------------------------------------------------------------------
# The emulated GPU. The host code is that of the other programs: no sanitizer, and it lays out no arena.

EMU_COMPILE = $(CXX) $(cppflags) $(EMUFLAGS) $(DEPENDENCIES)
$(BUILD)/emu_flags $(EMU_OBJ)/flags: force ; $(call remember,$(CXX) $(cppflags) $(EMUFLAGS) $(MPI_FLAGS) $(NATIVE_CPU))
EMU_LIBS := -rdynamic -lboost_context $(ONEDNN) -ldl $(MPI_LIBS)
EMU_LINK = @mkdir -p $(@D); set -x; $(CXX) $(EMUFLAGS) $(linked) $(EMU_LIBS)

$(EMU_OBJ)/%.o: %.cpp $(EMU_OBJ)/flags
	@mkdir -p $(@D)
	$(EMU_COMPILE) -c $< -o $@
# What executes PTX checks accesses itself, and is fast only if it is optimized; PTX says which sums are fused.
$(EMU_OBJ)/dev/emu/ptx/%.o $(EMU_OBJ)/dev/emu/races.o: private EMUFLAGS := \
  $(filter-out $(EMU_OPTIMIZE) -fsanitize% -fno-sanitize% -ffp-contract=%,$(EMUFLAGS)) \
  -O3 -g1 -fno-strict-aliasing -fno-trapping-math -ffp-contract=off
# Called for every access to shared memory.
$(EMU_OBJ)/dev/emu/shared_memory.o: private EMUFLAGS := $(filter-out $(EMU_OPTIMIZE),$(EMUFLAGS)) -O3 -g1

$(filter $(BUILD)/test_emu%,$(HOST_TESTS)): $(BUILD)/%: $(EMU_OBJ)/dev/test/%.o $(EMU_OBJS) $(BUILD)/emu_flags
	$(EMU_LINK) $(GTEST) -o $@

$(BUILD)/emu_ranks: $(EMU_OBJ)/dev/test/emu_ranks.o $(EMU_OBJS) $(HOST_LIB) $(BUILD)/flags $(BUILD)/emu_flags
	$(EMU_LINK) -o $@

PTX_COMPILE = $(NVCC) $(NVCC_CXX) $(cppflags) $(CXXSTD) -O3 -lineinfo $(if $(WERROR),-Werror all-warnings) -ptx
$(BUILD)/ptx_flags: force ; $(call remember,$(cuda) $(PTX_COMPILE))

define ptx_of
$(BUILD)/$(1)/%$(2).ptx: %.cu $(BUILD)/ptx_flags
	@mkdir -p $$(@D)
	$$(PTX_COMPILE) -arch=compute_$(3) $$(precision_flags.$(1)) $$(DEPENDENCIES) $$< -o $$@

endef
define emulated_programs
$(EMU_OBJ)/$(1)/%.o: %.cu $(EMU_OBJ)/flags
	@mkdir -p $$(@D)
	$$(EMU_COMPILE) $$(precision_flags.$(1)) -x c++ -c $$< -o $$@

$(EMU_OBJ)/$(1)/model.o: train_gpt2_sla.cu $(EMU_OBJ)/flags
	@mkdir -p $$(@D)
	$$(EMU_COMPILE) -DSLA_NO_MAIN $$(precision_flags.$(1)) -x c++ -c $$< -o $$@
$(patsubst %,$(EMU_OBJ)/$(1)/%.o,$(WITH_MODEL) memory_table gpu_model): private cppflags += -DSLA_LINKED_MODEL
$(WITH_MODEL:%=$(BUILD)/$(1)/%_emu): $(EMU_OBJ)/$(1)/model.o
# Its kernels are those of the model's object; of the host's code accesses are not checked.
$(EMU_OBJ)/$(1)/test_gpt2_sla.o: private EMUFLAGS += -O0 \
  $(foreach kind,instrument-reads instrument-writes stack globals,--param asan-$(kind)=0)

$(BUILD)/$(1)/%_emu: $(EMU_OBJ)/$(1)/%.o $(EMU_OBJS) $(HOST_LIB) $(BUILD)/flags $(BUILD)/emu_flags
	$$(EMU_LINK) $$(if $$(filter test_%,$$*),$$(GTEST)) -o $$@

# nvcc's code for the same kernels, as PTX, which the emulated GPU can execute in their place: SLA_EMU_PTX names it.
# That for Ampere has no suffix.
$(foreach arch,80 75 90a,$(call ptx_of,$(1),$(if $(filter-out 80,$(arch)),_$(arch)),$(arch)))
# They only plan, so that any machine can print them; the emulated GPU is needed to link.
$(BUILD)/$(1)/memory_table $(BUILD)/$(1)/gpu_model: $(BUILD)/$(1)/%: $(EMU_OBJ)/$(1)/%.o \
  $(EMU_OBJ)/$(1)/model.o $(EMU_OBJS) $(HOST_LIB) $(BUILD)/flags $(BUILD)/emu_flags
	$$(EMU_LINK) -o $$@

endef
$(eval $(foreach p,fp32 bf16 fp16,$(call emulated_programs,$(p))))

# An emulated AMX unit, to be preloaded, and where in oneDNN it must answer for the CPU.

$(BUILD)/emulated_amx.so: dev/emu_amx/amx.cpp $(BUILD)/flags
	$(CXX) $(CXXSTD) $(WARNINGS) -O2 -march=native -fPIC -shared -Wl,-z,initfirst $< -ldl -o $@

$(BUILD)/onednn_cpuid.txt: $(shell $(CXX) -print-file-name=libdnnl.so)
	@mkdir -p $(@D)
	objdump -d --no-show-raw-insn $< | awk '$$2 == "cpuid" || $$2 == "xgetbv" { print $$1, $$2 }' > $@

# ----------------------------------------------------------------------------
# On a GPU

# What `make gpu-check` runs.
gpu-checked: $(addprefix $(BUILD)/bf16/,bench_gpu train_gpt2_sla test_tile) \
  $(foreach p,bf16 fp32,$(addprefix $(BUILD)/$(p)/,$(DEVICE_TESTS)))

# GoogleTest from the system, or from its sources where those are all there is
# (INCLUDES=".../googletest/include .../googletest").
GPU_GTEST = $(shell echo 'int main() {}' | $(CXX) -x c++ - -lgtest -o /dev/null 2>/dev/null && echo '$(GTEST)' || \
  echo '$(BUILD)/gtest.o -lpthread')

$(BUILD)/gtest.o:
	@mkdir -p $(@D)
	printf '\043include "src/gtest-all.cc"\n\043include "src/gtest_main.cc"\n' | \
	  $(CXX) $(cppflags) $(CXXSTD) -O1 -x c++ -c - -o $@

$(BUILD)/%/test_gpt2_sla: test_gpt2_sla.cu $(HOST_LIB) $(BUILD)/nvcc_flags $(filter %.o,$(GPU_GTEST))
	$(NVCC_COMPILE) $(HOST_LIB) $(MPI_LIBS) $(GPU_GTEST) -lcublasLt $(NCCL_LIBS) -o $@

define operations_test
$(BUILD)/%/$(1): dev/test/$(1).cu $(BUILD)/nvcc_flags $(filter %.o,$(GPU_GTEST))
	$$(NVCC_COMPILE) $$(GPU_GTEST) -lcublasLt -o $$@

endef
$(eval $(foreach test,$(OPERATIONS_TESTS),$(call operations_test,$(test))))

FUZZED := dev/test/fuzz_safetensors.cpp llmc/formats/safetensors.cpp llmc/base/files.cpp
$(BUILD)/fuzz_safetensors: $(FUZZED) llmc/formats/safetensors.h $(wildcard llmc/base/*.h) $(BUILD)/flags
	@mkdir -p $(BUILD)
	$(CXX) $(cppflags) $(CXXSTD) $(WARNINGS) -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -Wno-unknown-pragmas -DSTANDALONE_FUZZER $(FUZZED) -o $@
