#include "code.h"
#include <algorithm>
#include <cstring>
#include <utility>
#include "llmc/base/error.h"
#include "warp.h"

namespace emu::ptx {
namespace {

// Runs the op with the lanes for which the guard holds.
void run_guarded(Warp& w, const Op& op) {
  const uint32_t before = w.active, holds = w.bits(op.guard);
  w.set_active(before & (op.guard_negated ? ~holds : holds));
  if (w.active != 0) op.guarded(w, op);
  w.set_active(before);
}

void run_nothing(Warp&, const Op&) {}

void run_add_number(Warp& w, const Op& op) {
  alignas(64) uint64_t sums[lanes];
  const uint64_t* const a = w.at<uint64_t>(op.at[1]);
  for (int i = 0; i < lanes; i++) sums[i] = a[i] + uint64_t(op.number);
  w.set(op.at[0], sums);
}

// A local address as a generic one, or with `number` -1 the other way round.
void run_convert_local(Warp& w, const Op& op) {
  alignas(64) uint64_t to[lanes];
  const uint64_t* const a = w.at<uint64_t>(op.at[1]);
  for (uint64_t i = 0; i < lanes; i++) {
    const uint64_t base = reinterpret_cast<uint64_t>(w.local) + i * w.code->kernel.local_bytes - local_window;
    to[i] = op.number < 0 ? a[i] - base : a[i] + base;
  }
  w.set(op.at[0], to);
}

template <class Wide, class Narrow>
void run_narrow(Warp& w, const Op& op) {
  alignas(64) Narrow to[lanes];
  const Wide* const from = w.at<Wide>(op.at[1]);
  for (int i = 0; i < lanes; i++) to[i] = Narrow(from[i]);
  w.set(op.at[0], to);
}
Handler narrowing(int from, int to) {
  if (from == 8) return to == 4 ? run_narrow<uint64_t, uint32_t> : run_narrow<uint64_t, uint16_t>;
  return run_narrow<uint32_t, uint16_t>;
}

// {a, b, ...} -> one register, the first in its lowest bits; and back.
template <class Whole, class Part>
void run_pack(Warp& w, const Op& op) {
  alignas(64) Whole whole[lanes] = {};
  for (size_t p = 0; p < op.list.size(); p++) {
    const Part* const part = w.at<Part>(op.list[p]);
    for (int i = 0; i < lanes; i++) whole[i] |= Whole(Whole(part[i]) << (8 * sizeof(Part) * p));
  }
  w.set(op.at[0], whole);
}
template <class Whole, class Part>
void run_unpack(Warp& w, const Op& op) {
  alignas(64) Whole whole[lanes];
  alignas(64) Part part[lanes];
  memcpy(whole, w.at<Whole>(op.at[1]), sizeof whole);  // the result may be the operand
  for (size_t p = 0; p < op.list.size(); p++) {
    for (int i = 0; i < lanes; i++) part[i] = Part(whole[i] >> (8 * sizeof(Part) * p));
    if (op.list[p] >= 0) w.set(op.list[p], part);
  }
}

void run_lane_mask(Warp& w, const Op& op) {
  alignas(64) uint32_t active[lanes];
  std::fill_n(active, lanes, w.active);
  w.set(op.at[0], active);
}

void run_trap(Warp& w, const Op& op) { fail(w, op, first_lane(w.active), "a trap"); }

// What stays in the frame at this place is written by nobody: a result that is called `_`.
constexpr const char* nowhere = "_";

}  // namespace

Words::Words(const std::string& opcode) {
  for (size_t at = 0; at <= opcode.size();) {
    const size_t end = std::min(opcode.find('.', at), opcode.size());
    words.push_back(opcode.substr(at, end - at));
    at = end + 1;
  }
}

bool Words::has(const char* word) const { return std::find(words.begin(), words.end(), word) != words.end(); }

std::string Code::describe(uint32_t op) const {
  const Instruction& i = kernel.instructions[ops[op].instruction];
  return i.opcode + " at " + (i.source >= 0 ? kernel.sources[size_t(i.source)] : "an unknown line") + " (" +
         module->path() + ":" + std::to_string(i.line) + ")";
}

// ----------------------------------------------------------------------------
// Operands

void Decoder::fail(const char* what) const {
  std::string operands;
  for (const Operand& o : now_->operands) operands += (operands.empty() ? " " : ", ") + o.name;
  user_error("%s:%d: the instruction `%s%s` (%s) is not emulated: %s; dev/emu/ptx is where it belongs",
             code_.module->path().c_str(), now_->line, now_->opcode.c_str(), operands.c_str(),
             now_->source >= 0 ? code_.kernel.sources[size_t(now_->source)].c_str() : "of an unknown line", what);
}

int32_t Decoder::new_register(int bytes) {
  const size_t at = code_.frame_bytes;
  code_.frame_bytes += size_t(bytes == 0 ? 4 : bytes) * lanes;
  return int32_t(at);
}

int32_t Decoder::temporary(int bytes) {
  const int32_t at = temporaries_ + temporary_bytes_;
  temporary_bytes_ += (bytes == 0 ? 4 : bytes) * lanes;
  most_temporary_bytes_ = std::max(most_temporary_bytes_, temporary_bytes_);
  return at;
}

int32_t Decoder::constant(uint64_t bits, int bytes) {
  if (bytes == 0) bits = bits != 0 ? ~uint64_t(0) : 0;
  const int stored = bytes == 0 ? 4 : bytes;
  if (stored < 8) bits &= (uint64_t(1) << (8 * stored)) - 1;
  const auto [it, is_new] = constants_.try_emplace({bits, stored});
  if (is_new) {
    it->second = new_register(stored);
    code_.constants.push_back({it->second, stored, bits});
  }
  return it->second;
}

int Decoder::bytes_of(const Operand& o) const {
  if (o.kind != Operand::reg) fail("an operand is no register");
  return code_.kernel.registers[size_t(o.index)].bytes;
}

uint64_t Decoder::value_of(const std::string& symbol) const {
  const Kernel& k = code_.kernel;
  for (const Variable& v : k.parameters)
    if (v.name == symbol) return reinterpret_cast<uint64_t>(code_.parameters.data()) + v.offset;
  for (const Variable& v : k.locals)
    if (v.name == symbol) return local_window + v.offset;
  for (const Variable& v : k.shared)
    if (v.name == symbol) return shared_window + v.offset;
  for (const Variable& v : code_.module->shared())
    if (v.name == symbol && v.bytes == 0) return shared_window + code_.static_shared_bytes;
  const auto variable = addresses_.find(symbol);
  if (variable == addresses_.end()) fail(("nothing is called " + symbol).c_str());
  return variable->second;
}

int32_t Decoder::source(const Operand& o, int bytes) {
  if (o.kind == Operand::number) return constant(o.bits, bytes);
  if (o.kind == Operand::symbol && o.name[0] == '%') {
    for (const Special& s : code_.specials)
      if (s.name == o.name) return s.at;
    code_.specials.push_back({o.name, new_register(o.name.find("64") != std::string::npos ? 8 : 4)});
    return code_.specials.back().at;
  }
  if (o.kind == Operand::symbol) return constant(value_of(o.name), bytes);
  const int declared = bytes_of(o);
  const int32_t at = places_[size_t(o.index)];
  uses_.back().reads.push_back(o.index);
  if (declared == bytes) return at;
  if (declared < bytes || bytes == 0) fail("an operand is narrower than its type");
  Op narrow;
  narrow.run = narrowing(declared, bytes);
  narrow.at[0] = temporary(bytes);
  narrow.at[1] = at;
  const int32_t low = narrow.at[0];
  emit(std::move(narrow));
  return low;
}

int32_t Decoder::result(const Operand& o, int bytes) {
  if (o.kind == Operand::symbol && o.name == nowhere) return temporary(bytes);
  if (bytes_of(o) != bytes) fail("the result's register has another size than its type");
  uses_.back().writes.push_back(o.index);
  return places_[size_t(o.index)];
}

void Decoder::address(const Operand& o, Op& op, int index) {
  if (o.kind != Operand::address || !o.parts.empty()) fail("an operand is no address");
  op.number += int64_t(o.bits);
  if (o.index < 0) {
    op.at[index] = constant(value_of(o.name), 8);
  } else {
    op.at[index] = places_[size_t(o.index)];
    op.narrow_address = code_.kernel.registers[size_t(o.index)].bytes == 4;
    uses_.back().reads.push_back(o.index);
  }
}

void Decoder::list(const Operand& o, Op& op, int bytes, bool is_result) {
  const auto add = [&](const Operand& part) {
    op.list.push_back(is_result && part.name == nowhere ? -1 : is_result ? result(part, bytes) : source(part, bytes));
  };
  if (o.kind != Operand::list) add(o);
  for (const Operand& part : o.parts) add(part);
}

void Decoder::shared_access(int bytes) { code_.smallest_shared_access = std::min(code_.smallest_shared_access, bytes); }

void Decoder::needs_clocks() { code_.has_clocks = true; }

void Decoder::wgmma_register(const Operand& o) {
  if (o.kind != Operand::reg) fail("an accumulator or a part of A is no register");
  const auto [it, is_new] = wgmma_numbers_.try_emplace(o.index, uint32_t(code_.wgmma_registers.size()));
  if (is_new) code_.wgmma_registers.push_back(o.index);
}

// Is called in the second decoding, when all registers of wgmma are known. A wgmma's are in the order of its list.
void Decoder::find_touched(Op& op) const {
  const auto add = [&](const Operand& o) {
    const auto number = o.kind == Operand::reg ? wgmma_numbers_.find(o.index) : wgmma_numbers_.end();
    if (number != wgmma_numbers_.end()) op.touched.push_back(number->second);
  };
  for (const Operand& o : now_->operands) {
    add(o);
    for (const Operand& part : o.parts) add(part);
  }
  if (op.touched.empty() || op.control == Control::warpgroup) return;
  op.untouched = op.run;
  op.run = run_checked;
}

// ----------------------------------------------------------------------------
// Instructions

void Decoder::emit(Op op) {
  op.instruction = uint32_t(now_ - code_.kernel.instructions.data());
  if (now_->guard >= 0) {
    op.guard = places_[size_t(now_->guard)];
    op.guard_negated = now_->guard_negated;
    if (op.control == Control::none) {
      op.guarded = op.run;
      op.run = run_guarded;
    }
  }
  code_.ops.push_back(std::move(op));
}

bool Decoder::decode_control(const Instruction& i, const Words& words, Op& op) {
  const std::string& name = words.first();
  if (name == "bra") {
    op.control = Control::branch;
    const auto label = code_.kernel.labels.find(i.operands.at(0).name);
    if (label == code_.kernel.labels.end()) fail("there is no such label");
    op.target = label->second;  // an instruction; end_straight_runs() makes it an op
  } else if (name == "ret" || name == "exit") {
    op.control = Control::exit;
  } else if (name == "trap" || name == "brkpt") {
    op.run = run_trap;
  } else if (name == "fence" && words.has("proxy")) {
    if (!words.has("async")) fail("of the proxies only the async one is known");
    op.run = words.has("global") ? run_nothing : run_proxy_fence;
  } else if (name == "membar" || name == "fence" || name == "prefetch" || name == "nanosleep" ||
             name == "griddepcontrol") {
    op.run = run_nothing;
  } else {
    return false;
  }
  return true;
}

// Moves of lists and symbols, and addresses from one space to another.
bool Decoder::decode_move(const Instruction& i, const Words& words, Op& op) {
  const std::string& name = words.first();
  const int bytes = atoi(words.last().c_str() + 1) / 8;
  if (name == "cvta") {
    op.at[0] = result(i.operands.at(0), 8);
    op.at[1] = source(i.operands.at(1), 8);
    const bool back = words.has("to");
    op.run = run_add_number;
    if (words.has("shared")) {
      const int64_t base = int64_t(addresses_.at("")) - int64_t(shared_window);
      op.number = back ? -base : base;
    } else if (words.has("local")) {
      op.run = run_convert_local;
      op.number = back ? -1 : 1;
    }
    return true;
  }
  if (name == "activemask") {
    op.at[0] = result(i.operands.at(0), 4);
    op.run = run_lane_mask;
    return true;
  }
  if (name != "mov" || i.operands.size() != 2) return false;
  const Operand &to = i.operands[0], &from = i.operands[1];
  if (from.kind == Operand::list) {
    const int part = bytes / int(from.parts.size());
    list(from, op, part, false);
    op.at[0] = result(to, bytes);
    op.run = bytes == 8 ? (part == 4 ? run_pack<uint64_t, uint32_t> : run_pack<uint64_t, uint16_t>)
                        : run_pack<uint32_t, uint16_t>;
    return bytes >= 4 && part >= 2;
  }
  if (to.kind == Operand::list) {
    const int part = bytes / int(to.parts.size());
    list(to, op, part, true);
    op.at[1] = source(from, bytes);
    op.run = bytes == 8 ? (part == 4 ? run_unpack<uint64_t, uint32_t> : run_unpack<uint64_t, uint16_t>)
                        : run_unpack<uint32_t, uint16_t>;
    return bytes >= 4 && part >= 2;
  }
  return false;
}

bool Decoder::decode_arithmetic(const Instruction& i, Op& op) {
  const Arithmetic* const a = find_arithmetic(i.opcode);
  if (a == nullptr) return false;
  if (a->bytes.size() != i.operands.size()) fail("it has another number of operands");
  op.run = a->run;
  for (size_t o = 1; o < i.operands.size(); o++) op.at[o] = source(i.operands[o], a->bytes[o]);
  op.at[0] = result(i.operands[0], a->bytes[0]);
  return true;
}

void Decoder::instruction(const Instruction& i) {
  now_ = &i;
  temporary_bytes_ = 0;
  uses_.emplace_back();
  if (i.guard >= 0) uses_.back().reads.push_back(i.guard);
  Op op;
  const Words words(i.opcode);
  if (!decode_control(i, words, op) && !decode_move(i, words, op) && !decode_memory(*this, i, words, op) &&
      !decode_warp(*this, i, words, op) && !decode_wgmma(*this, i, words, op) &&
      !decode_mbarrier(*this, i, words, op) && !decode_arithmetic(i, op))
    fail("it is not known");
  RegisterUse& use = uses_.back();
  if (i.guard >= 0) use.reads.insert(use.reads.end(), use.writes.begin(), use.writes.end());
  const uint32_t next = uint32_t(uses_.size());
  if (op.control == Control::branch) use.next.push_back(op.target);
  if (op.control == Control::none || i.guard >= 0 || (op.control != Control::branch && op.control != Control::exit))
    use.next.push_back(next);
  find_touched(op);
  emit(std::move(op));
}

// Finds the targets of branches, and how far each op can run straight on.
void Decoder::end_straight_runs() {
  std::vector<bool> is_target(code_.ops.size() + 1);
  for (Op& op : code_.ops) {
    if (op.control != Control::branch) continue;
    op.target = first_op_[op.target];
    is_target[op.target] = true;
  }
  for (size_t o = code_.ops.size(); o-- > 0;) {
    Op& op = code_.ops[o];
    if (op.control != Control::none) op.straight = 0;
    else op.straight = is_target[o + 1] || o + 1 == code_.ops.size() ? 1 : code_.ops[o + 1].straight + 1;
  }
}

void Decoder::decode_all() {
  for (const Instruction& i : code_.kernel.instructions) {
    first_op_.push_back(uint32_t(code_.ops.size()));
    instruction(i);
  }
  Op end;  // a kernel may end without ret, and a label may be its last line
  end.control = Control::exit;
  end.instruction = uint32_t(code_.kernel.instructions.size() - 1);
  first_op_.push_back(uint32_t(code_.ops.size()));
  code_.ops.push_back(end);
}

// After a first decoding, which has found out how registers are used: gives them their places, for the second.
void Decoder::share_places() {
  std::vector<int> bytes;
  for (const Register& r : code_.kernel.registers) bytes.push_back((r.bytes == 0 ? 4 : r.bytes) * lanes);
  std::vector<Lifetime> lifetimes = lifetimes_of(uses_, bytes.size());
  // A wgmma writes its accumulators later than where it stands.
  for (const int r : code_.wgmma_registers) lifetimes[size_t(r)] = {0, uint32_t(uses_.size())};
  temporaries_ = int32_t(assign_places(lifetimes, bytes, places_));
  code_.frame_bytes = size_t(temporaries_ + most_temporary_bytes_);
  code_.ops.clear();
  code_.constants.clear();
  code_.specials.clear();
  constants_.clear();
  first_op_.clear();
  uses_.clear();
}

void Decoder::run() {
  places_.resize(code_.kernel.registers.size());
  decode_all();
  share_places();
  decode_all();
  end_straight_runs();
}

Code decode(const Module& module, const std::string& kernel, const std::map<std::string, uint64_t>& addresses) {
  Code code;
  code.module = &module;
  code.kernel = module.parse(kernel);
  code.parameters.resize(std::max<size_t>(code.kernel.parameter_bytes, 1));
  code.static_shared_bytes = code.kernel.shared_bytes;
  for (const Variable& v : module.shared())
    if (v.bytes == 0)
      code.static_shared_bytes = (code.static_shared_bytes + v.alignment - 1) / v.alignment * v.alignment;
  if (code.kernel.instructions.empty())
    user_error("%s: the kernel %s has no instructions", module.path().c_str(), kernel.c_str());
  Decoder(code, addresses).run();
  return code;
}

}  // namespace emu::ptx
