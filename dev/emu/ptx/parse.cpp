#include "parse.h"
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <utility>
#include "llmc/base/error.h"

namespace emu::ptx {
namespace {

// Words (names, numbers, directives, opcodes) and single characters; comments and white space are skipped.
class Tokens {
 public:
  Tokens(const std::string& path, const std::string& text, size_t at = 0, int line = 1)
      : path_(path), text_(text), at_(at), line_(line) {
    advance();
  }

  const std::string& now() const { return word_; }  // "" at the end
  bool is(const char* word) const { return word_ == word; }
  bool is_directive() const { return word_[0] == '.'; }
  int line() const { return line_of_word_; }
  size_t position() const { return first_; }

  std::string take() {
    std::string word = std::move(word_);
    advance();
    return word;
  }
  bool skip(const char* word) {
    if (!is(word)) return false;
    advance();
    return true;
  }
  void expect(const char* word) {
    if (!skip(word)) fail("'%s' where '%s' is expected", word_.c_str(), word);
  }
  // Takes everything up to the end of the line.
  std::string rest_of_line() {
    const size_t end = std::min(text_.find('\n', at_), text_.size());
    std::string rest = word_ + text_.substr(at_, end - at_);
    at_ = end;
    advance();
    return rest;
  }
  // Past a `{ ... }` at which it stands.
  void skip_block() {
    int depth = 0;
    do {
      depth += is("{") ? 1 : is("}") ? -1 : 0;
      if (word_.empty()) fail("a '{' without its '}'");
      advance();
    } while (depth > 0);
  }
  template <class... Args>
  [[noreturn]] void fail(const char* format, Args... args) const {
    user_error("%s:%d: %s", path_.c_str(), line_of_word_, ::format(format, args...).c_str());
  }

 private:
  static bool is_word(char c) {
    return isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
  }

  char at(size_t i) const { return i < text_.size() ? text_[i] : '\0'; }
  bool stands(char a, char b) const { return at(at_) == a && at(at_ + 1) == b; }

  void skip_space() {
    for (; at_ < text_.size(); at_++) {
      if (text_[at_] == '\n') line_++;
      else if (stands('/', '/')) at_ = std::min(text_.find('\n', at_), text_.size()) - 1;
      else if (stands('/', '*')) at_ = std::min(text_.find("*/", at_), text_.size() - 2) + 1;
      else if (!isspace(static_cast<unsigned char>(text_[at_]))) return;
    }
  }
  void advance() {
    skip_space();
    first_ = at_;
    line_of_word_ = line_;
    if (at_ < text_.size() && text_[at_] == '"') {
      at_ = std::min(text_.find('"', at_ + 1), text_.size() - 1) + 1;
    } else {
      // "shared::cta" is one word, "label:" two.
      while (is_word(at(at_)) || stands(':', ':')) at_ += text_[at_] == ':' ? 2 : 1;
      if (at_ == first_ && at_ < text_.size()) at_++;
    }
    word_.assign(text_, first_, at_ - first_);
  }

  const std::string& path_;
  const std::string& text_;
  size_t at_, first_ = 0;
  int line_, line_of_word_ = 1;
  std::string word_;
};

bool is_number(const std::string& word) { return isdigit(static_cast<unsigned char>(word[0])); }

// 12, 0x1f, 0f3F800000 (a float's bits), 0d3FF0000000000000 (a double's).
uint64_t number_of(const std::string& word) {
  if (word.compare(0, 2, "0f") == 0 || word.compare(0, 2, "0F") == 0 || word.compare(0, 2, "0d") == 0 ||
      word.compare(0, 2, "0D") == 0)
    return strtoull(word.c_str() + 2, nullptr, 16);
  return strtoull(word.c_str(), nullptr, 0);
}

uint64_t take_number(Tokens& t) {
  const bool negative = t.skip("-");
  if (!is_number(t.now())) t.fail("'%s' where a number is expected", t.now().c_str());
  const uint64_t value = number_of(t.take());
  return negative ? -value : value;
}

// The bytes of a type, ".b32", ".f64", ...; 0 for .pred.
int bytes_of_type(Tokens& t, const std::string& type) {
  if (type == ".pred") return 0;
  const int bits = type.size() > 2 ? atoi(type.c_str() + 2) : 0;
  if (bits % 8 != 0 || bits < 8 || bits > 128) t.fail("'%s' is not a type", type.c_str());
  return bits / 8;
}

// What follows `.param`, `.local`, `.shared`, `.const` or `.global`: ".align 8 .b8 name[24] = {1, 2}".
Variable take_variable(Tokens& t) {
  Variable v;
  int size = 0;
  while (t.is_directive()) {
    const std::string word = t.take();
    if (word == ".align") v.alignment = size_t(take_number(t));
    else if (word != ".ptr" && word != ".global" && word != ".shared" && word != ".const" && word != ".local")
      size = bytes_of_type(t, word);
  }
  v.alignment = std::max(v.alignment, size_t(size));
  v.name = t.take();
  v.bytes = size_t(size);
  while (t.skip("[")) {
    v.bytes *= t.is("]") ? 0 : size_t(take_number(t));
    t.expect("]");
  }
  if (t.skip("=")) {
    const bool is_list = t.skip("{");
    do {
      const uint64_t value = take_number(t);
      v.initial.append(reinterpret_cast<const char*>(&value), size_t(size));
    } while (is_list && t.skip(","));
    if (is_list) t.expect("}");
  }
  return v;
}

// Places `v` behind those before it.
void place(std::vector<Variable>& variables, size_t& bytes, Variable v) {
  v.offset = (bytes + v.alignment - 1) / v.alignment * v.alignment;
  bytes = v.offset + v.bytes;
  variables.push_back(std::move(v));
}

// The body of a kernel.
class Parser {
 public:
  Parser(Tokens& t, Kernel& kernel, const std::map<int, std::string>& files) : t_(t), kernel_(kernel), files_(files) {}

  void parse() {
    t_.expect("{");
    scopes_.emplace_back();
    while (!scopes_.empty()) {
      if (t_.now().empty()) t_.fail("the kernel %s has no end", kernel_.name.c_str());
      if (t_.skip("{")) open_scope();
      else if (t_.skip("}")) close_scope();
      else if (t_.skip(";")) continue;
      else if (t_.is_directive()) directive();
      else statement();
    }
  }

 private:
  struct Scope {
    std::unordered_map<std::string, int> registers;    // by their names
    std::unordered_map<std::string, uint32_t> labels;  // the index of the instruction
    size_t first_instruction = 0;
  };

  void open_scope() {
    scopes_.emplace_back();
    scopes_.back().first_instruction = kernel_.instructions.size();
  }

  // A label is known in its scope only: inline assembly that the compiler has repeated has the same ones again.
  void close_scope() {
    const Scope scope = std::move(scopes_.back());
    scopes_.pop_back();
    const std::string suffix = scopes_.empty() ? "" : " of scope " + std::to_string(num_scopes_++);
    for (const auto& [label, instruction] : scope.labels) kernel_.labels[label + suffix] = instruction;
    if (scopes_.empty()) return;
    for (size_t i = scope.first_instruction; i < kernel_.instructions.size(); i++) {
      Instruction& branch = kernel_.instructions[i];
      if (branch.opcode.compare(0, 3, "bra") != 0 || branch.operands.empty()) continue;
      std::string& label = branch.operands[0].name;
      if (scope.labels.count(label) != 0) label += suffix;
    }
  }

  void directive() {
    const std::string word = t_.now();
    if (word == ".loc") return location();
    if (word == ".pragma" || word == ".file" || word == ".section") return void(t_.rest_of_line());
    t_.take();
    if (word == ".reg") return declare_registers();
    if (word == ".local") place(kernel_.locals, kernel_.local_bytes, take_variable(t_));
    else if (word == ".shared") place(kernel_.shared, kernel_.shared_bytes, take_variable(t_));
    else t_.fail("the directive %s is not known", word.c_str());
    t_.expect(";");
  }

  // ".reg .b32 %r<10>;" declares %r0 to %r9, ".reg .b32 a, b;" two.
  void declare_registers() {
    const int bytes = bytes_of_type(t_, t_.take());
    do {
      const std::string name = t_.take();
      if (t_.skip("<")) {
        const uint64_t count = take_number(t_);
        for (uint64_t i = 0; i < count; i++) declare(name + std::to_string(i), bytes);
        t_.expect(">");
      } else {
        declare(name, bytes);
      }
    } while (t_.skip(","));
    t_.expect(";");
  }
  void declare(const std::string& name, int bytes) {
    scopes_.back().registers[name] = int(kernel_.registers.size());
    kernel_.registers.push_back({name, bytes});
  }
  int find_register(const std::string& name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const auto it = scope->registers.find(name); it != scope->registers.end()) return it->second;
    return -1;
  }

  // ".loc 2 59 22, function_name NAME, inlined_at 1 31 3": the line that follows comes from line 59 of file 2.
  void location() {
    t_.take();
    std::string source = place_of_location();
    while (t_.skip(",")) {
      if (t_.skip("inlined_at")) source += ", inlined at " + place_of_location();
      else
        for (t_.take(); !t_.is(","); t_.take()) {}
    }
    if (kernel_.sources.empty() || kernel_.sources.back() != source) kernel_.sources.push_back(std::move(source));
  }
  std::string place_of_location() {
    const int file = int(take_number(t_));
    const uint64_t line = take_number(t_);
    take_number(t_);  // the column
    const auto it = files_.find(file);
    return (it != files_.end() ? it->second : "file " + std::to_string(file)) + ":" + std::to_string(line);
  }

  // A label, or an instruction with its `;`.
  void statement() {
    Instruction i;
    i.line = t_.line();
    i.source = int(kernel_.sources.size()) - 1;
    if (t_.skip("@")) {
      i.guard_negated = t_.skip("!");
      i.guard = find_register(t_.now());
      if (i.guard < 0) t_.fail("the predicate %s is not declared", t_.now().c_str());
      t_.take();
    }
    i.opcode = t_.take();
    if (t_.skip(":")) {
      scopes_.back().labels[i.opcode] = uint32_t(kernel_.instructions.size());
      return;
    }
    while (!t_.is(";")) {
      i.operands.push_back(operand());
      if (!t_.skip(",") && !t_.is(";")) t_.fail("'%s' after an operand of %s", t_.now().c_str(), i.opcode.c_str());
    }
    t_.take();
    kernel_.instructions.push_back(std::move(i));
  }

  Operand operand() {
    Operand o;
    if (t_.skip("[")) {
      o = operand();
      if (o.kind != Operand::reg && o.kind != Operand::symbol) t_.fail("an address that begins with a number");
      o.kind = Operand::address;
      while (t_.is("+") || t_.is("-")) {
        const bool negative = t_.take() == "-";
        const uint64_t value = take_number(t_);
        o.bits += negative ? -value : value;
      }
      while (t_.skip(",")) o.parts.push_back(operand());
      t_.expect("]");
      return o;
    }
    if (t_.skip("{")) {
      o.kind = Operand::list;
      do o.parts.push_back(operand());
      while (t_.skip(","));
      t_.expect("}");
      return o;
    }
    if (t_.is("-") || is_number(t_.now())) {
      o.bits = take_number(t_);
      return o;
    }
    o.name = t_.take();
    o.index = find_register(o.name);
    o.kind = o.index >= 0 ? Operand::reg : Operand::symbol;
    if (!t_.skip("|")) return o;
    Operand pair;
    pair.kind = Operand::list;
    pair.parts = {o, operand()};
    return pair;
  }

  Tokens& t_;
  Kernel& kernel_;
  const std::map<int, std::string>& files_;
  std::vector<Scope> scopes_;
  int num_scopes_ = 0;  // that have been closed within others
};

// The path as it is in the repository: from the last folder that the repository has at its top.
std::string shortened(const std::string& path) {
  for (const char* folder : {"/dev/", "/llmc/"})
    if (const size_t at = path.rfind(folder); at != std::string::npos) return path.substr(at + 1);
  return path.substr(path.rfind('/') + 1);
}

}  // namespace

Module::Module(const std::string& path, std::string text) : path_(path), text_(std::move(text)) {
  Tokens t(path_, text_);
  if (!t.is(".version")) user_error("%s: no PTX: it should begin with .version", path_.c_str());
  while (!t.now().empty()) {
    const size_t first = t.position();
    const int line = t.line();
    const std::string word = t.take();
    if (word == ".target") {
      target_ = t.take();
    } else if (word == ".entry") {
      entries_[t.now()] = {first, line};
      while (!t.is("{")) t.take();
      t.skip_block();
    } else if (word == ".func") {
      t.fail("functions that are called, as %s, are not emulated", t.now().c_str());
    } else if (word == ".shared") {
      shared_.push_back(take_variable(t));
    } else if (word == ".global" || word == ".const") {
      Variable v = take_variable(t);
      variables_[v.name] = std::move(v);
    } else if (word == ".file") {
      const int number = int(take_number(t));
      const std::string name = t.take();
      files_[number] = shortened(name.substr(1, name.size() - 2));
    } else if (word == ".section") {
      t.take();
      t.skip_block();
    }
  }
}

std::vector<std::string> Module::kernels() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

Kernel Module::parse(const std::string& name) const {
  const Entry& entry = entries_.at(name);
  Tokens t(path_, text_, entry.first, entry.line);
  Kernel kernel;
  t.expect(".entry");
  kernel.name = t.take();
  if (t.skip("(")) {
    while (t.skip(".param")) {
      place(kernel.parameters, kernel.parameter_bytes, take_variable(t));
      t.skip(",");
    }
    t.expect(")");
  }
  while (!t.is("{")) t.take();  // .maxntid and the like
  Parser(t, kernel, files_).parse();
  return kernel;
}

}  // namespace emu::ptx
