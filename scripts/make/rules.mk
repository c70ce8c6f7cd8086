# How programs are built. A stamp for each compiler rebuilds what is concerned when its flags change: the objects of a
# folder, and the programs.

remember = @mkdir -p $(@D); echo '$(1)' | cmp -s - $@ || echo '$(1)' > $@
$(BUILD)/flags $(OBJ)/flags: force
	$(call remember,$(CXX) $(cppflags) $(cxxflags) $(HOST_MARCH) $(MPI_FLAGS) $(NATIVE_CPU))
$(BUILD)/nvcc_flags: force ; $(call remember,$(NVCC) $(cuda) $(cppflags) $(nvccflags))
.PHONY: force
force:

DEPENDENCIES = -MMD -MP -MF $@.d
COMPILE = $(CXX) $(cppflags) $(cxxflags) $(DEPENDENCIES)
ONEDNN := -ldnnl
GTEST := -lgtest -lgtest_main -lpthread
# Where the .cu files lie.
vpath %.cu dev/test dev/bench

# At the top level lie the programs as links, in the precision asked for or its default.
TOP_LEVEL := $(foreach p,$(PROGRAMS),$p $p_emu $p_cpu) test_gpt2_sla test_gpt2_sla_emu
$(filter-out %_cpu,$(TOP_LEVEL)): %: $(BUILD)/$(gpu_precision)/% force
	@ln -sf $< $@
$(filter %_cpu,$(TOP_LEVEL)): %: $(BUILD)/$(cpu_precision)/% force
	@ln -sf $< $@

# Host code

# `private`: not for the stamp that they depend on.
$(OBJ)/llmc/% $(OBJ)/data/% $(OBJ)/scripts/% $(OBJ)/report.o: private march := $(HOST_MARCH)
$(OBJ)/llmc/ranks/ranks.o: private cppflags += $(MPI_FLAGS)
$(OBJ)/report.o $(OBJ)/scripts/%.o $(addprefix $(OBJ)/data/,tokenize.o convert.o probe.o): private cxxflags += $(COLD)
$(foreach f,ranks/ train/ wiring/ formats/config_,$(OBJ)/llmc/$(f)%.o) $(REPORT_OBJS): private cxxflags += $(COLD)
# A test runs for milliseconds and takes seconds to compile, but for the reference's.
$(OBJ)/dev/test/%.o: private cxxflags += $(if $(filter %/test_reference.o,$@),$(COLD),-O0) -DSLA_CPU

$(OBJ)/llmc/formats/config_json.o: $(wildcard llmc/formats/huggingface/*.py)

# What pages with charts contain beside the repository's files. A folder of INCLUDES can have chart.min.js, too; it
# names its licence.
$(OBJ)/charts/flags: force ; $(call remember,$(CHART_JS) $(CHART_LICENCE))
$(OBJ)/charts/%: $(OBJ)/charts/flags
	cat $($*) /dev/null > $@
$(OBJ)/charts/chart.js: private chart.js := $(CHART_JS)
$(OBJ)/charts/chart_licence.txt: private chart_licence.txt := $(CHART_LICENCE)
$(OBJ)/llmc/report/parts.o: $(addprefix llmc/report/report.,css js) \
  $(addprefix $(OBJ)/charts/chart,.js _licence.txt)
$(OBJ)/llmc/report/parts.o: private cxxflags += -Wa,-I$(OBJ)/charts
$(OBJ)/%.o: %.cpp $(OBJ)/flags
	@mkdir -p $(@D)
	$(COMPILE) -c $< -o $@

$(HOST_LIB): $(HOST_OBJS)
$(REPORT_LIB): $(REPORT_OBJS)
$(HOST_LIB) $(REPORT_LIB):
	@rm -f $@
	$(AR) rcs $@ $^

data/tokenize: $(addprefix $(OBJ)/data/,tokenize.o corpus.o archive_stream.o shards.o vocabulary.o) $(HOST_LIB) \
  $(BUILD)/flags
	$(CXX) $(cxxflags) $(filter %.o %.a,$^) -larchive -lz -lpthread -o $@

report data/convert: %: $(OBJ)/%.o
report: $(REPORT_LIB)
experiment: $(OBJ)/scripts/experiments/experiment.o
data/probe: $(OBJ)/data/probe.o $(OBJ)/data/shards.o
$(BUILD)/encode_records: $(OBJ)/dev/encode_records.o
report experiment data/convert data/probe $(BUILD)/encode_records: $(HOST_LIB) $(BUILD)/flags
	$(CXX) $(cxxflags) $(filter-out $(HOST_LIB),$(filter %.o %.a,$^)) $(HOST_LIB) -o $@

# The model's object comes before that of its tests: of an inline function that both have, the linker takes the first.
linked = $(filter %/model.o,$^) $(filter-out %/model.o,$(filter %.o %.a,$^))

# On the CPU

CPU_LINK = @mkdir -p $(@D); set -x; $(CXX) $(cxxflags) $(linked) $(MPI_LIBS) $(ONEDNN)

define cpu_programs
$(OBJ)/cpu/$(1)/%.o: %.cu $(OBJ)/flags
	@mkdir -p $$(@D)
	$$(COMPILE) -DSLA_CPU $$(precision_flags.$(1)) -x c++ -c $$< -o $$@

$(OBJ)/cpu/$(1)/model.o: train_gpt2_sla.cu $(OBJ)/flags
	@mkdir -p $$(@D)
	$$(COMPILE) -DSLA_CPU -DSLA_NO_MAIN $$(precision_flags.$(1)) -x c++ -c $$< -o $$@
$(WITH_MODEL:%=$(OBJ)/cpu/$(1)/%.o): private cppflags += -DSLA_LINKED_MODEL
$(OBJ)/cpu/$(1)/test_gpt2_sla.o: private cxxflags += $(COLD)
$(WITH_MODEL:%=$(BUILD)/$(1)/%_cpu): $(OBJ)/cpu/$(1)/model.o

$(BUILD)/$(1)/%_cpu: $(OBJ)/cpu/$(1)/%.o $(HOST_LIB) $(BUILD)/flags
	$$(CPU_LINK) $$(if $$(filter test_%,$$*),$$(GTEST)) -o $$@

$(BUILD)/$(1)/bench_cpu: $(OBJ)/cpu/$(1)/bench_cpu.o $(HOST_LIB) $(BUILD)/flags
	$$(CPU_LINK) -o $$@

endef
$(eval $(foreach p,fp32 bf16,$(call cpu_programs,$(p))))

# On a GPU

NVCC_COMPILE = @mkdir -p $(@D); set -x; $(NVCC) $(cppflags) $(nvccflags) $(precision_flags.$*) $(DEPENDENCIES) $<
define gpu_program
$(BUILD)/%/$(1): $(1).cu $(HOST_LIB) $(BUILD)/nvcc_flags
	$$(NVCC_COMPILE) $(HOST_LIB) $(MPI_LIBS) -lcublasLt $(NCCL_LIBS) -o $$@

endef
$(eval $(foreach program,$(PROGRAMS) bench_gpu,$(call gpu_program,$(program))))

-include $(wildcard $(BUILD)/*.d $(BUILD)/*/*.d \
  $(foreach depth,* */* */*/* */*/*/*,$(OBJ)/$(depth).d $(EMU_OBJ)/$(depth).d))
