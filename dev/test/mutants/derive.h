// Mutants: small changes of C++ source that some test should notice. They are derived from tokens, without a
// parser or types, so a mutant need not compile. The rules rely on how this project is formatted: a binary operator has
// a space on both sides, and the angle brackets of a template have none before them.
#pragma once
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace mutants {

// source[begin, end) is replaced by `text`, which has as many lines, so that __LINE__ is the same everywhere.
struct Mutant {
  const char* kind;
  size_t begin, end;
  std::string text;
};

// ----------------------------------------------------------------------------
// Tokens

enum class TokenKind { word, number, literal, symbol };  // literal: of characters

struct Token {
  TokenKind kind;
  size_t begin, end;
};

// The tokens of source, without comments and preprocessor directives.
class Lexer {
 public:
  explicit Lexer(const std::string& source) : s_(source) {}

  std::vector<Token> tokens() {
    std::vector<Token> all;
    for (skip_blank(); at_ < s_.size(); skip_blank()) {
      const size_t begin = at_;
      const TokenKind kind = take();
      all.push_back({kind, begin, at_});
    }
    return all;
  }

 private:
  bool starts(const char* text) const { return s_.compare(at_, std::char_traits<char>::length(text), text) == 0; }
  void skip_past(const char* text) {
    at_ = std::min(s_.find(text, at_), s_.size() - 1) + std::char_traits<char>::length(text);
  }
  bool is_word(size_t i) const { return i < s_.size() && (isalnum(static_cast<unsigned char>(s_[i])) || s_[i] == '_'); }

  void skip_blank() {
    while (at_ < s_.size()) {
      if (s_[at_] == '\n') at_++, line_is_empty_ = true;
      else if (isspace(static_cast<unsigned char>(s_[at_]))) at_++;
      else if (starts("//")) at_ = std::min(s_.find('\n', at_), s_.size());
      else if (starts("/*")) at_ += 2, skip_past("*/");
      else if (line_is_empty_ && s_[at_] == '#') skip_directive();
      else break;
    }
    line_is_empty_ = false;
  }

  void skip_directive() {
    for (; at_ < s_.size() && s_[at_] != '\n'; at_++)
      if (s_[at_] == '\\' && at_ + 1 < s_.size()) at_++;  // the directive continues in the next line
  }

  TokenKind take() {
    if (starts("R\"")) {
      const std::string delimiter = s_.substr(at_ + 2, s_.find('(', at_) - at_ - 2);
      skip_past((")" + delimiter + "\"").c_str());
      return TokenKind::literal;
    }
    if (s_[at_] == '"' || s_[at_] == '\'') {
      const char quote = s_[at_++];
      for (; at_ < s_.size() && s_[at_] != quote; at_++)
        if (s_[at_] == '\\') at_++;
      at_++;
      return TokenKind::literal;
    }
    if (isdigit(static_cast<unsigned char>(s_[at_]))) {
      while (is_word(at_) || s_[at_] == '.' || (s_[at_] == '\'' && is_word(at_ + 1)) ||
             ((s_[at_] == '+' || s_[at_] == '-') && (s_[at_ - 1] == 'e' || s_[at_ - 1] == 'p')))
        at_++;
      return TokenKind::number;
    }
    if (is_word(at_)) {
      while (is_word(at_)) at_++;
      return TokenKind::word;
    }
    for (const char* symbol : {"<<=", ">>=", "...", "->*", "::", "->", "++", "--", "<<", ">>", "<=", ">=",
                               "==",  "!=",  "&&",  "||",  "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^="})
      if (starts(symbol)) {
        at_ += std::char_traits<char>::length(symbol);
        return TokenKind::symbol;
      }
    at_++;
    return TokenKind::symbol;
  }

  const std::string& s_;
  size_t at_ = 0;
  bool line_is_empty_ = true;  // so far
};

// ----------------------------------------------------------------------------
// Derivation

class Deriver {
 public:
  explicit Deriver(const std::string& source) : s_(source), tokens_(Lexer(source).tokens()) {
    match_brackets();
    find_unchecked();
  }

  std::vector<Mutant> derive() {
    for (size_t i = 0; i < tokens_.size(); i++) {
      note_declaration(i);
      if (is_invariant_[i]) continue;
      if (is_statement(i)) mutate_statement(i);
      mutate_condition(i);
      mutate_operator(i);
      mutate_arguments(i);
      mutate_constant(i);
    }
    std::sort(found_.begin(), found_.end(), [](const Mutant& a, const Mutant& b) {
      return std::tie(a.begin, a.end, a.text) < std::tie(b.begin, b.end, b.text);
    });
    const auto same = [](const Mutant& a, const Mutant& b) {
      return a.begin == b.begin && a.end == b.end && a.text == b.text;
    };
    found_.erase(std::unique(found_.begin(), found_.end(), same), found_.end());
    return std::move(found_);
  }

 private:
  static constexpr size_t none = size_t(-1);
  enum class Braces {
    code,
    type,
    list
  };  // a function's or a statement's; a struct's or a namespace's; an initialiser's
  struct Range {
    size_t begin, end;  // tokens
  };

  std::string text(size_t i) const {
    return i < tokens_.size() ? s_.substr(tokens_[i].begin, tokens_[i].end - tokens_[i].begin) : "";
  }
  std::string text(Range r) const {
    return s_.substr(tokens_[r.begin].begin, tokens_[r.end - 1].end - tokens_[r.begin].begin);
  }
  bool is(size_t i, const char* what) const { return i < tokens_.size() && text(i) == what; }
  bool is_in(size_t i, const std::set<std::string>& words) const {
    return i < tokens_.size() && words.count(text(i)) > 0;
  }
  bool is_kind(size_t i, TokenKind kind) const { return i < tokens_.size() && tokens_[i].kind == kind; }
  bool is_word(size_t i) const { return is_kind(i, TokenKind::word); }
  bool space_before(size_t i) const {
    return tokens_[i].begin > 0 && isspace(static_cast<unsigned char>(s_[tokens_[i].begin - 1]));
  }
  bool space_after(size_t i) const {
    return tokens_[i].end < s_.size() && isspace(static_cast<unsigned char>(s_[tokens_[i].end]));
  }
  bool is_binary(size_t i) const {
    return i > 0 && space_before(i) && space_after(i) && !is_in(i - 1, {"operator", "template"});
  }
  bool is_assignment(size_t i) const {
    return is_in(i, {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="});
  }

  void add(const char* kind, size_t begin, size_t end, std::string text) {
    const auto lines = [](const std::string& t) { return std::count(t.begin(), t.end(), '\n'); };
    for (long missing = lines(s_.substr(begin, end - begin)) - lines(text); missing > 0; missing--) text += '\n';
    found_.push_back({kind, begin, end, std::move(text)});
  }
  void replace(const char* kind, size_t i, const std::string& text) {
    add(kind, tokens_[i].begin, tokens_[i].end, text);
  }

  // ---- structure

  void match_brackets() {
    partner_.assign(tokens_.size(), none), enclosing_.assign(tokens_.size(), none),
        braces_.assign(tokens_.size(), Braces::list);
    std::vector<size_t> open;
    for (size_t i = 0; i < tokens_.size(); i++) {
      const bool closes = is_in(i, {")", "]", "}"});
      if (closes && !open.empty()) partner_[i] = open.back(), partner_[open.back()] = i, open.pop_back();
      enclosing_[i] = open.empty() ? none : open.back();
      if (is(i, "{")) braces_[i] = kind_of_braces(i);
      if (is_in(i, {"(", "[", "{"})) open.push_back(i);
    }
    for (size_t i : open) partner_[i] = tokens_.size() - 1;  // a file that ends too early
  }

  // The token before i on its level: a bracket's partner for a closing bracket.
  size_t before(size_t i) const {
    if (i == 0) return none;
    return partner_[i - 1] != none && partner_[i - 1] < i - 1 ? partner_[i - 1] : i - 1;
  }

  Braces kind_of_braces(size_t i) const {
    if (i == 0) return Braces::type;
    const size_t p = i - 1, outer = enclosing_[i];
    const Braces outside = outer == none ? Braces::type : is(outer, "{") ? braces_[outer] : Braces::list;
    if (is(p, "]")) return Braces::code;  // a lambda's
    if (is(p, ")") || is_in(p, {"const", "noexcept", "override", "else", "do", "try", "mutable", ";", "}"}))
      return Braces::code;
    if (is(p, "{")) return outside;
    if (is(p, ":") && outside == Braces::code) return Braces::code;  // a label's
    bool names_type = false;
    for (size_t j = p; j != none && !is_in(j, {";", "{", "}", "(", "[", "=", ",", "return"}); j = before(j)) {
      if (is(j, "->")) return Braces::code;  // a result's type stands before a function's body
      if (is_in(j, {"struct", "class", "union", "namespace", "enum", "extern"})) names_type = true;
    }
    return names_type ? Braces::type : Braces::list;
  }

  // A broken invariant aborts by CHECK. No test can break it, so what stands there is left as it is.
  void find_unchecked() {
    is_invariant_.assign(tokens_.size(), false);
    for (size_t i = 0; i + 1 < tokens_.size(); i++)
      if (is_in(i, {"CHECK", "static_assert", "assert"}) && is(i + 1, "("))
        for (size_t j = i; j <= partner_[i + 1]; j++) is_invariant_[j] = true;
  }

  // The `>` of the template arguments that begin at i; none, if they are none.
  size_t template_end(size_t i) const {
    if (!is(i, "<") || space_before(i)) return none;
    int depth = 0;
    for (size_t j = i; j < tokens_.size() && !is_in(j, {";", "{", "}", ")"}); j++) {
      if (is_in(j, {"(", "["})) j = partner_[j];
      else if (is(j, "<") && !space_before(j)) depth++;
      else if (is(j, ">")) depth--;
      else if (is(j, ">>")) depth -= 2;
      if (depth <= 0) return j;
    }
    return none;
  }

  // Past a chain such as a.b<c>(d)[e]->f++ that begins at i. `acts`: whether it calls or counts.
  size_t chain_end(size_t i, bool& acts) const {
    acts = false;
    for (; is_in(i, {"*", "&", "::", "++", "--", "!"}); i++) acts |= is_in(i, {"++", "--"});
    if (is(i, "(")) i = partner_[i] + 1;
    else if (is_word(i)) i++;
    else return i;
    while (i < tokens_.size()) {
      if (is_in(i, {"::", ".", "->"})) i += is_in(i + 1, {"*", "&", "~"}) ? 3 : 2;
      else if (is_in(i, {".*", "->*"})) i += 2;
      else if (is(i, "(")) i = partner_[i] + 1, acts = true;
      else if (is(i, "[")) i = partner_[i] + 1;
      else if (is_in(i, {"++", "--"})) i++, acts = true;
      else if (template_end(i) != none) i = template_end(i) + 1;
      else break;
    }
    return i;
  }

  // ---- statements

  // Whether a statement begins at i, in a function's body.
  bool is_statement(size_t i) const {
    if (i == 0 || enclosing_[i] == none || !is(enclosing_[i], "{") || braces_[enclosing_[i]] != Braces::code)
      return false;
    const size_t p = i - 1;
    if (is(p, "{") || is(p, ";") || is(p, "else") || is(p, "do")) return true;
    if (is(p, "}")) return braces_[partner_[p]] != Braces::list;
    if (is(p, ":")) return ends_label(p);
    if (!is(p, ")")) return false;
    const size_t head = partner_[p];
    return head != none && head > 0 &&
           (is_in(head - 1, {"if", "for", "while"}) || (head > 1 && is(head - 1, "constexpr")));
  }

  // Whether the colon at i ends a case of a switch.
  bool ends_label(size_t i) const {
    while (i > 1 && (is_word(i - 1) || is_kind(i - 1, TokenKind::number) || is_kind(i - 1, TokenKind::literal) ||
                     is(i - 1, "::")))
      i--;
    return is_in(i, {"case", "default"});
  }

  // The parts between the commas of [begin, end).
  std::vector<Range> split(size_t begin, size_t end) const {
    std::vector<Range> parts = {{begin, begin}};
    for (size_t i = begin; i < end; i++) {
      if (is_in(i, {"(", "[", "{"})) i = partner_[i];
      else if (template_end(i) != none && template_end(i) < end) i = template_end(i);
      else if (is(i, ",")) parts.back().end = i, parts.push_back({i + 1, i + 1});
    }
    parts.back().end = end;
    return parts;
  }

  bool synchronizes(Range part) const {
    static const std::vector<std::string> names = {"sync", "wait", "record", "fence", "barrier", "commit_copies"};
    for (size_t i = part.begin; i < part.end && !is(i, "("); i++) {
      std::string name = text(i);
      for (char& c : name) c = char(tolower(c));
      for (const std::string& n : names) {
        const size_t at = name.find(n);
        if (at != std::string::npos && (at == 0 || name.compare(at - 1, 5, "async") != 0)) return true;
      }
    }
    return false;
  }

  void mutate_statement(size_t i) {
    static const std::set<std::string> declares = {"auto",     "bool",  "break",     "case",    "catch",     "char",
                                                   "class",    "const", "constexpr", "default", "do",        "double",
                                                   "else",     "enum",  "extern",    "float",   "for",       "friend",
                                                   "goto",     "if",    "int",       "long",    "namespace", "private",
                                                   "public",   "short", "signed",    "static",  "struct",    "switch",
                                                   "template", "throw", "try",       "typedef", "union",     "unsigned",
                                                   "using",    "void",  "while"};
    size_t end = i;
    while (end < tokens_.size() && !is_in(end, {";", "}"}))
      end = is_in(end, {"(", "[", "{"}) ? partner_[end] + 1 : end + 1;
    if (!is(end, ";") || end == i) return;
    if (is_in(i, {"return", "continue"})) {
      if (end == i + 1) replace("statement", i, "");
      return;
    }
    if (is_in(i, declares)) return;
    bool acts;
    const size_t after = chain_end(i, acts);
    if (!is_assignment(after) && !(acts && (after == end || !is_word(after)))) return;  // a declaration
    const std::vector<Range> parts = split(i, end);
    for (size_t n = 0; n < parts.size(); n++) {
      const Range part = parts[n];
      if (part.begin >= part.end) continue;
      // Removes the part with the comma after it, or the last one with the comma before it. In place of the only one an
      // empty statement stays.
      const size_t first = n > 0 && n + 1 == parts.size() ? tokens_[part.begin - 1].begin : tokens_[part.begin].begin;
      const size_t last = n + 1 < parts.size() ? tokens_[part.end].end : tokens_[part.end - 1].end;
      add(synchronizes(part) ? "synchronization" : "statement", first, last, "");
      mutate_assignment(part);
    }
  }

  void mutate_assignment(Range part) {
    bool acts;
    const size_t at = chain_end(part.begin, acts);
    if (at >= part.end || !is_assignment(at)) return;
    const bool is_arithmetic =
        !is_kind(at + 1, TokenKind::literal) && !is_in(at + 1, {"{", "[", "nullptr", "true", "false"});
    if (!is(at, "=")) replace("assignment", at, "=");
    else if (is_arithmetic) replace("assignment", at, "+=");
  }

  // ---- expressions

  void mutate_condition(size_t i) {
    if (is_in(i, {"if", "while", "for"})) {
      const size_t open = is(i + 1, "constexpr") ? i + 2 : i + 1;
      if (!is(open, "(")) return;
      Range condition = {open + 1, partner_[open]};
      std::vector<size_t> ends;
      for (size_t j = condition.begin; j < condition.end; j++)
        if (is(j, ";") && enclosing_[j] == open) ends.push_back(j);
      if (is(i, "for")) {
        if (ends.size() != 2) return;
        condition = {ends[0] + 1, ends[1]};
      } else if (!ends.empty()) {
        condition.begin = ends[0] + 1;
      }
      negate(condition);
    } else if (is(i, "?")) {
      size_t begin = i;
      while (begin > 0 && !ends_ternary(begin - 1))
        begin = partner_[begin - 1] != none ? partner_[begin - 1] : begin - 1;
      negate({begin, i});
    }
  }

  // Whether the condition of a ternary operator can begin no further left than after i.
  bool ends_ternary(size_t i) const {
    return is_assignment(i) || is_in(i, {",", "return", "?", ":", ";", "(", "[", "{", "}", "<<"});
  }

  void negate(Range condition) {
    if (condition.begin >= condition.end) return;
    int equalities = 0, others = 0;
    for (size_t i = condition.begin; i < condition.end; i++) {
      if (is_in(i, {"==", "!="})) equalities++;
      else if (is_in(i, {"&&", "||", "(", "?"})) others++;
    }
    if (equalities == 1 && others == 0) return;  // the other comparison is the same mutant
    add("condition", tokens_[condition.begin].begin, tokens_[condition.end - 1].end, "!(" + text(condition) + ")");
  }

  void mutate_operator(size_t i) {
    static const std::vector<std::pair<std::string, std::string>> comparisons = {{"<", "<="},  {"<=", "<"},
                                                                                 {">", ">="},  {">=", ">"},
                                                                                 {"==", "!="}, {"!=", "=="}};
    if (!is_kind(i, TokenKind::symbol) || !is_binary(i)) return;
    for (const auto& [from, to] : comparisons)
      if (text(i) == from) replace("comparison", i, to);
    if (is(i, "&&")) replace("logic", i, "||");
    if (is(i, "||")) replace("logic", i, "&&");
    const bool adds_texts = is_kind(i - 1, TokenKind::literal) || is_kind(i + 1, TokenKind::literal);
    const bool has_left =
        is_word(i - 1) ? !is(i - 1, "return") : is_kind(i - 1, TokenKind::number) || is_in(i - 1, {")", "]"});
    if (!has_left || adds_texts) return;
    if (is(i, "+")) replace("sign", i, "-");
    if (is(i, "-")) replace("sign", i, "+");
  }

  // What the name at i is declared as, if it is there: `float*` of `const float* x` and of the y in `float x, *y`. A
  // name that is declared again has the type of the last declaration.
  void note_declaration(size_t i) {
    static const std::set<std::string> no_types = {"return", "else",  "new",  "delete", "typename",
                                                   "case",   "throw", "goto", "const"};
    if (!is_word(i) || i == 0 || !is_in(i + 1, {"=", ",", ";", ")", "{", "[", "(", ":"})) return;
    size_t p = i - 1;
    std::string stars;
    for (; p > 0 && is_in(p, {"*", "&"}) && !is_binary(p); p--) stars += text(p);
    if ((is_word(p) && !is_in(p, no_types)) || (is(p, ">") && !space_before(p))) {
      declared_type_ = text(p), declared_in_ = enclosing_[i];
    } else if (!is(p, ",") || declared_in_ != enclosing_[i] || declared_type_.empty()) {
      return;
    }
    types_[text(i)] = declared_type_ + stars;
    if (is_in(i + 1, {";", ")", "("})) declared_type_.clear();
  }

  // The declared type of an argument that is a name, or ends with a member's; its shape, if none was seen.
  std::string type_of(Range argument) const {
    const size_t last = argument.end - 1;
    const bool is_name = is_word(last) && (last == argument.begin || is_in(last - 1, {".", "->"}));
    const auto declared = is_name ? types_.find(text(last)) : types_.end();
    return declared != types_.end() ? declared->second : last == argument.begin && is_word(last) ? "" : shape(argument);
  }

  // Words are all alike: a.b[c] has the shape of d.e[f]. "" for an argument that is worth no swap.
  std::string shape(Range part) const {
    std::string shape;
    if (part.end - part.begin > 12) return "";
    for (size_t i = part.begin; i < part.end; i++) {
      if (is_kind(i, TokenKind::literal) || is_in(i, {"(", "{", "<", "true", "false", "nullptr", "this"})) return "";
      shape += is_word(i) ? "w" : is_kind(i, TokenKind::number) ? "n" : text(i);
    }
    return shape;
  }

  // Whether it declares: words with nothing, or a pointer's star, between them.
  bool is_parameter(Range part) const {
    for (size_t i = part.begin; i + 1 < part.end; i++) {
      if (is_word(i) && is_word(i + 1)) return true;
      if (is_word(i) && is_in(i + 1, {"*", "&", "&&"}) && !space_before(i + 1)) return true;
    }
    return false;
  }

  void mutate_arguments(size_t i) {
    static const std::set<std::string> others =
        {"if",       "for",     "while", "switch", "return", "sizeof", "catch",
         "decltype", "alignas", "min",   "max",    "fminf",  "fmaxf"};  // the order of whose arguments changes nothing
    if (!is(i, "(") || i == 0 || space_before(i) || !(is_word(i - 1) || is(i - 1, ">")) || is_in(i - 1, others)) return;
    const std::vector<Range> arguments = split(i + 1, partner_[i]);
    for (const Range& argument : arguments)
      if (argument.begin >= argument.end || is_parameter(argument)) return;
    for (size_t n = 0; n + 1 < arguments.size(); n++) {
      const Range a = arguments[n], b = arguments[n + 1];
      if (shape(a).empty() || shape(a) != shape(b) || text(a) == text(b) || type_of(a).empty() ||
          type_of(a) != type_of(b))
        continue;
      const size_t begin = tokens_[a.begin].begin, a_end = tokens_[a.end - 1].end, b_begin = tokens_[b.begin].begin;
      add("arguments", begin, tokens_[b.end - 1].end, text(b) + s_.substr(a_end, b_begin - a_end) + text(a));
    }
  }

  void mutate_constant(size_t i) {
    if (!is_kind(i, TokenKind::number)) return;
    const std::string number = text(i);
    const bool is_hex = number.compare(0, 2, "0x") == 0;
    if (number.find_first_of(is_hex ? ".pP'" : ".eEfF'") != std::string::npos) return;
    if (i > 2 && is(i - 1, "[") && is_word(i - 2) && is_word(i - 3) && !is(i - 3, "return"))
      return;  // an array with room for one more
    char* rest = nullptr;
    const unsigned long long value = strtoull(number.c_str(), &rest, 0);
    replace("constant", i, std::to_string(value + 1) + rest);
  }

  const std::string& s_;
  std::vector<Token> tokens_;
  std::vector<size_t> partner_;    // of a bracket
  std::vector<size_t> enclosing_;  // the bracket that is open at a token
  std::vector<Braces> braces_;     // of `{`
  std::vector<bool> is_invariant_;
  std::map<std::string, std::string> types_;  // that names were declared as
  std::string declared_type_;                 // by the declaration at hand, in which more names may come
  size_t declared_in_ = none;
  std::vector<Mutant> found_;
};

// All mutants of a C++ file, in the order of their places.
inline std::vector<Mutant> derive_mutants(const std::string& source) { return Deriver(source).derive(); }

// ----------------------------------------------------------------------------
// How a mutant is shown

inline std::string with_single_spaces(const std::string& text) {
  std::string result;
  for (char c : text) {
    if (!isspace(static_cast<unsigned char>(c))) result += c;
    else if (!result.empty() && result.back() != ' ') result += ' ';
  }
  while (!result.empty() && result.back() == ' ') result.pop_back();
  return result;
}

inline int line_of(const std::string& source, size_t at) {
  return 1 + int(std::count(source.begin(), source.begin() + long(at), '\n'));
}

// The lines that a mutant changes, before and after, each as one; without the last one's comment, whose words may
// change.
inline std::pair<std::string, std::string> changed_lines(const std::string& source, const Mutant& m) {
  const size_t before = m.begin == 0 ? std::string::npos : source.rfind('\n', m.begin - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1,
               line_end = std::min(source.find('\n', m.end), source.size());
  const size_t end = std::min(source.find("  // ", m.end), line_end);
  return {with_single_spaces(source.substr(begin, end - begin)),
          with_single_spaces(source.substr(begin, m.begin - begin) + m.text + source.substr(m.end, end - m.end))};
}

}  // namespace mutants
