#include "wiring.h"
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>
#include "llmc/base/error.h"
#include "llmc/base/text.h"

namespace {

template <class... T>
std::vector<WiringTerm> one_of_each(const std::variant<T...>&) {
  return {T()...};
}

std::string name_of(const WiringTerm& t) { return info_of(t).syntax.name(); }

std::string term_text(const WiringTerm& t) {
  const std::string arguments = std::visit([](const auto& term) { return term.arguments(); }, t);
  return name_of(t) + (arguments.empty() ? "" : "(" + arguments + ")");
}

// "rmsnorm, at character 1", or "rmsnorm of modern, at character 1".
std::string term_and_place(const WiringTerm& t) {
  return std::visit(
      [&](const Term& term) {
        const std::string of = *term.of ? std::string(" of ") + term.of : "";
        return format("%s%s, at character %d", term_text(t).c_str(), of.c_str(), term.character);
      },
      t);
}

// The names of all terms for which `holds` is true, as a list that ends with `last` and one more.
template <class Predicate>
std::string names_of_terms(const char* last, Predicate holds) {
  std::vector<std::string> names;
  for (const WiringTerm& t : known_terms())
    if (holds(info_of(t))) names.push_back(name_of(t));
  return joined(names, ", ", last);
}

bool combine(const TermInfo& a, const TermInfo& b) { return (a.excludes & b.sets) == 0 && (b.excludes & a.sets) == 0; }

// The terms with one of which a term that needs others has them.
std::string terms_needed_by(const TermInfo& of) {
  return names_of_terms(" or ", [&](const TermInfo& x) { return (x.sets & of.needs) != 0 && combine(x, of); });
}

constexpr const char* spaces = " \t";

// A word that is short for several terms, which take its place in the wiring's text.
struct ShortName {
  const char* name;
  std::string terms;
  const char* help;
};
const ShortName short_names[] = {
    {"modern", "rmsnorm qknorm rope relu2 untied softcap(15)", "the block that nanochat trains"}};

// The text with `to` in place of each `from` that stands between spaces.
std::string with_words(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = 0, next; (at = text.find(from, at)) != std::string::npos; at = next) {
    const size_t end = at + from.size();
    const bool begins = at == 0 || strchr(spaces, text[at - 1]) != nullptr,
               is_word = begins && (end == text.size() || strchr(spaces, text[end]) != nullptr);
    if (is_word) text.replace(at, from.size(), to);
    next = is_word ? at + to.size() : end;
  }
  return text;
}

// The short name that the word at `at` is; null if it is none.
const ShortName* short_name_at(const std::string& text, size_t at) {
  const std::string word = text.substr(at, text.find_first_of(spaces, at) - at);
  for (const ShortName& s : short_names)
    if (word == s.name) return &s;
  return nullptr;
}

// The arguments between parentheses after a name, none where no parenthesis follows. a.end moves past them.
void take_arguments(TermReader& a) {
  if (a.end >= a.wiring.size() || a.wiring[a.end] != '(') return;
  const size_t open = a.end, close = a.wiring.find(')', open);
  a.end = std::min(close, a.wiring.size() - 1) + 1;
  if (close == std::string::npos) a.error("the parenthesis is not closed");
  const std::string inside = a.wiring.substr(open + 1, close - open - 1);
  if (inside.find('(') != std::string::npos) a.error("a parenthesis within another");
  for (const std::string& argument : split(inside, ',')) {
    const size_t first = argument.find_first_not_of(spaces);
    a.arguments.push_back(
        first == std::string::npos ? "" : argument.substr(first, argument.find_last_not_of(spaces) + 1 - first));
  }
}

// Reads the term that begins at `at`, which moves past it.
WiringTerm read_term(const std::string& text, size_t& at) {
  TermReader a = {text, at, std::min(text.find_first_of(std::string(spaces) + "(", at), text.size())};
  const std::string name = a.text();
  const auto known =
      std::find_if(known_terms().begin(), known_terms().end(), [&](const WiringTerm& t) { return name_of(t) == name; });
  if (known == known_terms().end()) {
    std::vector<std::string> names;
    for (const WiringTerm& t : known_terms()) names.push_back(name_of(t));
    for (const ShortName& s : short_names) names.push_back(s.name);
    const std::string nearest = nearest_name(name, names);
    a.error("there is no such term" + (nearest.empty() ? "" : "; is it " + nearest + "?") + " (" +
            names_of_terms(", ", [](const TermInfo&) { return true; }) + ")");
  }
  take_arguments(a);
  if (a.end < text.size() && strchr(spaces, text[a.end]) == nullptr) {
    a.end++;
    a.error("a space must stand between two terms");
  }
  a.syntax = info_of(*known).syntax;
  if (a.count() < a.syntax.least_arguments || a.count() > a.syntax.most_arguments) a.error("it is " + a.syntax.text());
  at = a.end;
  WiringTerm t = *known;
  std::visit([&](auto& term) { term.read(a), term.character = int(a.begin) + 1; }, t);
  return t;
}

// ----------------------------------------------------------------------------
// What goes together

[[noreturn]] void term_error(const Wiring& w, const WiringTerm& t, const std::string& what) {
  user_error("wiring \"%s\": %s: %s", w.given, term_and_place(t), what);
}

// What a term that excludes some others combines with, in words.
std::string combinations_of(const TermInfo& info) {
  const std::string others = names_of_terms(" and ", [&](const TermInfo& other) {
    return other.sets != 0 && other.syntax.form != info.syntax.form && combine(info, other);
  });
  const std::string why = *info.why_excludes ? info.why_excludes + std::string("; ") : "";
  return why + info.syntax.name() + " does with " + others;
}

// Why a term cannot follow another one; "" if it can.
std::string contradiction(const WiringTerm& t, const WiringTerm& before) {
  const TermInfo info = info_of(t), info_before = info_of(before);
  const bool is_again = t.index() == before.index();
  if (is_again ? info.may_be_repeated : combine(info, info_before)) return "";
  const std::string other = term_and_place(before);
  auto repeatable = [](const TermInfo& x) { return x.may_be_repeated; };
  if (is_again)
    return "the term is there already: " + other + "; only " + names_of_terms(" and ", repeatable) + " may be repeated";
  const bool excludes = (info.excludes & info_before.sets) != 0;
  return "does not combine with " + other + ": " + combinations_of(excludes ? info : info_before);
}

void check_combinations(const Wiring& w) {
  unsigned set = 0;
  for (const WiringTerm& t : w.terms) set |= info_of(t).sets;
  for (const WiringTerm& t : w.terms) {
    const TermInfo info = info_of(t);
    if (info.sets == 0 && w.terms.size() > 1) term_error(w, t, "is plain GPT-2, alone; leave it out");
    for (const WiringTerm* before = &w.terms[0]; before != &t; before++) {
      const std::string wrong = contradiction(t, *before);
      if (!wrong.empty()) term_error(w, t, wrong);
    }
    if ((info.needs & ~set) != 0) term_error(w, t, "needs " + terms_needed_by(info) + ": " + info.why_needs);
  }
}

// Why an attention cannot compute the gradients of its keys and values; "" if it can: it writes the gradient of each K
// head and V head once, so heads that use the same keys must use the same values, and the other way round.
std::string kv_conflict(const WiringTable& t) {
  for (int l = 0; l < t.num_layers; l++) {
    std::map<std::pair<int, int>, int> v_of_k, k_of_v;  // layers, by layer and K/V head
    for (int i = 0; i < t.num_heads; i++)
      for (const KVSource& source : t.sources(l, i)) {
        const int v = v_of_k.try_emplace({source.k, t.kv_head(i)}, source.v).first->second,
                  k = k_of_v.try_emplace({source.v, t.kv_head(i)}, source.k).first->second;
        const auto conflict = [&](const char* these, int first, int second, const char* shared, int layer) {
          return format("in layer %d heads up to %d use %s of layers %d and %d with the same %s, those of layer %d for "
                        "K/V head %d; the same %s must have the same %s",
                        l, i, these, first, second, shared, layer, t.kv_head(i), shared, these);
        };
        if (v != source.v) return conflict("values", v, source.v, "keys", source.k);
        if (k != source.k) return conflict("keys", k, source.k, "values", source.v);
      }
  }
  return "";
}

// Why a layer's own K/V heads cannot be another layer's in some updates; "" if they can: query heads that share one
// must all use the layer's own, or attention might write the gradients of the same head twice.
std::string route_conflict(const WiringTable& t) {
  for (int l = 0; l < t.num_layers; l++)
    for (int i = 1; i < t.num_heads; i++)
      if (t.kv_head(i) == t.kv_head(i - 1) && t.sources(l, i) != t.sources(l, i - 1))
        return format("in layer %d heads %d and %d share a K/V head, but not its source, as layers that are routed "
                      "must",
                      l, i - 1, i);
  return "";
}

constexpr size_t most_terms = 1000;  // each is compared with those before it, and applied to every head
}  // namespace

const std::vector<WiringTerm>& known_terms() {
  static const std::vector<WiringTerm> terms = one_of_each(WiringTerm());
  return terms;
}

TermInfo info_of(const WiringTerm& t) {
  return std::visit([](const auto& x) -> TermInfo { return {x.features, x.syntax, x.help, x.may_be_repeated}; }, t);
}

std::string wiring_help() {
  const struct {
    const char* name;
    unsigned features;
  } groups[] = {{"whose K/V", Feature::sources | Feature::kv_heads | Feature::values | Feature::routes},
                {"which keys", Feature::windows | Feature::patterns | Feature::top_keys | Feature::documents |
                                   Feature::hashing | Feature::no_key},
                {"whose attention map", Feature::maps},
                {"positions", Feature::positions | Feature::segments},
                {"layers", Feature::cycles | Feature::halting},
                {"norms and the residual stream",
                 Feature::norms | Feature::head_norms | Feature::joins | Feature::inputs},
                {"MLPs and the output head", Feature::activations | Feature::heads | Feature::caps}};
  std::string text = "A wiring is a text of terms, applied from left to right to plain GPT-2.\n";
  auto add = [&](const TermInfo& info) {
    const std::string needs = info.needs != 0 ? "; needs " + terms_needed_by(info) : "";
    text += "  " + info.syntax.text() + "\n      " + info.help + needs + "\n";
  };
  add(info_of(PlainTerm()));
  for (const auto& [name, features] : groups) {
    text += std::string("\n") + name + ":\n";
    for (const WiringTerm& t : known_terms())
      if ((info_of(t).sets & features) != 0) add(info_of(t));
  }
  text += "\nshort for several terms:\n";
  for (const ShortName& s : short_names)
    text += std::string("  ") + s.name + "\n      " + s.terms + ": " + s.help + "\n";
  return text;
}

Wiring parse_wiring(const std::string& given) {
  Wiring w;
  w.given = given, w.text.clear(), w.terms.clear();
  for (char& c : w.given)
    if (c >= '\n' && c <= '\r') c = ' ';
  for (size_t at = 0, end = 0; (at = w.given.find_first_not_of(spaces, at)) != std::string::npos; end = at) {
    if (w.terms.size() >= most_terms) user_error("the wiring has more than %zu terms", most_terms);
    const size_t begin = at;
    const ShortName* const short_name = short_name_at(w.given, at);
    if (short_name == nullptr) {
      w.terms.push_back(read_term(w.given, at));
    } else {
      for (WiringTerm t : parse_wiring(short_name->terms).terms) {
        std::visit([&](Term& term) { term.character = int(begin) + 1, term.of = short_name->name; }, t);
        w.terms.push_back(t);
      }
      at += strlen(short_name->name);
    }
    w.text += w.given.substr(end, begin - end) + (short_name ? short_name->terms : w.given.substr(begin, at - begin));
  }
  if (w.terms.empty()) user_error("the wiring is empty; plain GPT-2 is \"plain\"");
  check_combinations(w);
  return w;
}

std::string with_short_names(std::string text) {
  for (const ShortName& s : short_names) text = with_words(text, s.terms, s.name);
  return text;
}

Wiring skip_layer_wiring(int num_skip_layer, int num_skip_head) {
  if (num_skip_head == 0) return Wiring();
  return parse_wiring(format("sla(%d,%d)", num_skip_layer, num_skip_head));
}

Wiring default_wiring(int num_layers, int num_heads) {
  return skip_layer_wiring(num_layers * 3 / 4, num_layers >= 2 ? num_heads * 3 / 4 : 0);
}

double most_attentions(const Wiring& w, int num_layers, int num_heads) {
  double of_a_head = 1;
  for (const WiringTerm& t : w.terms)
    of_a_head += std::visit([&](const auto& term) { return term.more_attentions(num_layers); }, t);
  return double(num_layers) * num_heads * of_a_head;
}

void validate(const Wiring& w, int num_layers, int num_heads) {
  for (const WiringTerm& t : w.terms) {
    const std::string wrong = std::visit([&](const auto& term) { return term.misfit(num_layers, num_heads); }, t);
    if (!wrong.empty()) term_error(w, t, wrong);
  }
  // The table must suit the first term of which `concerns` is true.
  auto check = [&](std::string (*conflict)(const WiringTable&), auto concerns) {
    const auto term = std::find_if(w.terms.begin(), w.terms.end(), concerns);
    if (term == w.terms.end()) return;
    const std::string wrong = conflict(wiring_table(w, num_layers, num_heads));
    if (!wrong.empty()) term_error(w, *term, wrong);
  };
  check(kv_conflict, [](const WiringTerm& t) { return std::visit([](auto& x) { return x.moves_one_part(); }, t); });
  check(route_conflict, [](const WiringTerm& t) { return std::holds_alternative<RouteTerm>(t); });
}

std::string canonical_text(const Wiring& w) {
  std::vector<std::string> texts;
  for (const WiringTerm& t : w.terms) texts.push_back(term_text(t));
  return joined(texts, " ");
}

WiringTable wiring_table(const Wiring& w, int num_layers, int num_heads) {
  WiringTable table;  // of plain GPT-2
  table.num_layers = table.stored_layers = num_layers, table.num_heads = table.num_kv_heads = num_heads;
  for (int l = 0; l < num_layers; l++) {
    table.map_layer.push_back(l);
    table.source_layers.insert(table.source_layers.end(), size_t(num_heads), {l});
  }
  table.masks.resize(size_t(num_layers * num_heads));
  for (const WiringTerm& t : w.terms) std::visit([&](const auto& term) { term.apply(table); }, t);
  return table;
}
