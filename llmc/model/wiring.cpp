#include "wiring.h"
#include <algorithm>
#include "llmc/ops/lsh.h"
#include "llmc/utils/error.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"

using Kind = WiringTerm::Kind;
using How = WiringTerm::How;

namespace {

// The terms that there are: name, kind, how many arguments, and how to write one.
struct TermSyntax {
  const char* name;
  Kind kind;
  int least_arguments, most_arguments;
  const char* form;
};
constexpr double default_rope_base = 10000, default_ponder_cost = 0.01;

const TermSyntax syntaxes[] = {
    {"plain", Kind::plain, 0, 0, "plain"},
    {"sla", Kind::sla, 2, 2, "sla(distance, heads), such as sla(9, 9) or sla(9, 3:12)"},
    {"also", Kind::also, 2, 2, "also(distance, heads), such as also(2, 4) or also(2, 0:4)"},
    {"share", Kind::share, 1, 1, "share(layers in a group), such as share(2)"},
    {"layers", Kind::layers, 1, 1, "layers(the layer for each layer), such as layers(0_0_2_2)"},
    {"gqa", Kind::gqa, 1, 1, "gqa(K/V heads), such as gqa(4)"},
    {"window", Kind::window, 1, 2, "window(keys) or window(keys, pattern of S and L), such as window(512, SSSL)"},
    {"strided", Kind::strided, 1, 2, "strided(stride) or strided(stride, heads|layers|union), such as strided(64)"},
    {"fixed", Kind::fixed, 2, 3,
     "fixed(block, columns) or fixed(block, columns, heads|layers|union), such as fixed(64, 8)"},
    {"topk", Kind::topk, 1, 1, "topk(keys), such as topk(64)"},
    {"reuse", Kind::reuse, 1, 1, "reuse(layers in a group), such as reuse(2)"},
    {"blend", Kind::blend, 1, 1, "blend(share of the layer below), such as blend(0.3)"},
    {"gate", Kind::gate, 0, 0, "gate"},
    {"rope", Kind::rope, 0, 1, "rope or rope(base), such as rope(10000)"},
    {"relative", Kind::relative, 0, 0, "relative"},
    {"memory", Kind::memory, 1, 1, "memory(positions), such as memory(512)"},
    {"universal", Kind::universal, 1, 1, "universal(layers in a cycle), such as universal(2)"},
    {"act", Kind::act, 1, 2, "act(eps) or act(eps, cost), such as act(0.01)"},
    {"rmsnorm", Kind::rmsnorm, 0, 0, "rmsnorm"},
    {"gru", Kind::gru, 0, 0, "gru"},
    {"lsh", Kind::lsh, 2, 2, "lsh(buckets, rounds), such as lsh(32, 2)"},
    {"reversible", Kind::reversible, 0, 0, "reversible"},
};

const TermSyntax& syntax_of(Kind kind) {
  return *std::find_if(std::begin(syntaxes), std::end(syntaxes), [&](const TermSyntax& s) { return s.kind == kind; });
}

std::string without_spaces_around(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t") + 1 - begin);
}

std::string arguments_text(const WiringTerm& t) {
  const std::string n = std::to_string(t.n);
  const std::string how = t.how == How::layers ? ",layers" : t.how == How::both ? ",union" : "";
  switch (t.kind) {
    case Kind::sla:
    case Kind::also:
      return n + "," +
             (t.last_heads > 0 ? std::to_string(t.last_heads)
                               : std::to_string(t.first_head) + ":" + std::to_string(t.end_head));
    case Kind::layers: {
      std::string layers;
      for (int layer : t.layers) layers += (layers.empty() ? "" : "_") + std::to_string(layer);
      return layers;
    }
    case Kind::window: return n + (t.pattern.empty() ? "" : "," + t.pattern);
    case Kind::strided: return n + how;
    case Kind::lsh: return n + "," + std::to_string(t.c);
    case Kind::fixed: return n + "," + std::to_string(t.c) + how;
    case Kind::blend:
    case Kind::rope: return shortest(t.a);
    case Kind::act: return shortest(t.a) + (t.cost == default_ponder_cost ? "" : "," + shortest(t.cost));
    default: return n;
  }
}

std::string term_text(const WiringTerm& t) {
  const TermSyntax& s = syntax_of(t.kind);
  const bool has_none = s.most_arguments == 0 || (t.kind == Kind::rope && t.a == default_rope_base);
  return has_none ? s.name : s.name + ("(" + arguments_text(t) + ")");
}

// Reads a wiring's text from left to right.
struct Parser {
  const std::string& text;
  size_t at = 0, term_begin = 0, term_end = 0;

  [[noreturn]] void error(const std::string& what) const {
    user_error("wiring \"%s\": %s, at character %zu: %s", text.c_str(),
               text.substr(term_begin, term_end - term_begin).c_str(), term_begin + 1, what.c_str());
  }

  void skip_spaces() {
    while (at < text.size() && (text[at] == ' ' || text[at] == '\t')) at++;
  }

  template <class T>
  T number(const std::string& argument, const TermSyntax& s) const {
    try {
      return parse_number<T>(argument);
    } catch (const UserError& e) { error(format("%s; it is %s", e.what(), s.form)); }
  }

  int whole_number(const std::string& argument, int least, const TermSyntax& s) const {
    const int value = number<int>(argument, s);
    if (value < least || value > 1 << 30) error(format("%d must be at least %d, and at most 2^30", value, least));
    return value;
  }

  // The arguments between parentheses after a name, without the spaces around them; none where no parenthesis follows.
  std::vector<std::string> arguments() {
    if (at >= text.size() || text[at] != '(') return {};
    const size_t close = text.find(')', at);
    term_end = std::min(close, text.size() - 1) + 1;
    if (close == std::string::npos) error("the parenthesis is not closed");
    const std::string inside = text.substr(at + 1, close - at - 1);
    at = close + 1;
    if (inside.find('(') != std::string::npos) error("a parenthesis within another");
    std::vector<std::string> arguments;
    for (size_t begin = 0, comma = 0; comma != std::string::npos; begin = comma + 1) {
      comma = inside.find(',', begin);
      arguments.push_back(without_spaces_around(inside.substr(begin, comma - begin)));
    }
    return arguments;
  }

  void read_heads(WiringTerm& t, const std::string& argument, const TermSyntax& s) const {
    const size_t colon = argument.find(':');
    if (colon == std::string::npos) {
      t.last_heads = whole_number(argument, 1, s);
      return;
    }
    t.first_head = whole_number(argument.substr(0, colon), 0, s);
    t.end_head = whole_number(argument.substr(colon + 1), 1, s);
    if (t.first_head >= t.end_head)
      error(format("%d:%d holds no head; a range begins with its first head and ends before its second number",
                   t.first_head, t.end_head));
  }

  void read_layers(WiringTerm& t, const std::string& argument, const TermSyntax& s) const {
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
      end = argument.find('_', begin);
      const int layer = whole_number(argument.substr(begin, end - begin), 0, s), l = int(t.layers.size());
      if (layer > l)
        error(format("layer %d cannot attend to layer %d, which is above it; it can to layers 0 to %d", l, layer, l));
      t.layers.push_back(layer);
    }
  }

  How read_how(const std::string& argument) const {
    if (argument == "heads") return How::heads;
    if (argument == "layers") return How::layers;
    if (argument == "union") return How::both;
    error("\"" + argument + "\" must be heads, layers or union");
  }

  WiringTerm read_term() {
    term_begin = at;
    while (at < text.size() && text[at] != ' ' && text[at] != '\t' && text[at] != '(') at++;
    term_end = at;
    const std::string name = text.substr(term_begin, at - term_begin);
    const auto s =
        std::find_if(std::begin(syntaxes), std::end(syntaxes), [&](const TermSyntax& x) { return name == x.name; });
    if (s == std::end(syntaxes)) {
      std::vector<std::string> names;
      for (const TermSyntax& x : syntaxes) names.push_back(x.name);
      std::string list;
      for (const std::string& x : names) list += (list.empty() ? "" : ", ") + x;
      const std::string nearest = nearest_name(name, names);
      error("there is no such term" + (nearest.empty() ? "" : "; is it " + nearest + "?") + " (" + list + ")");
    }
    const std::vector<std::string> args = arguments();
    if (at < text.size() && text[at] != ' ' && text[at] != '\t') {
      term_end = at + 1;
      error("a space must stand between two terms");
    }
    const int count = int(args.size());
    if (count < s->least_arguments || count > s->most_arguments) error(std::string("it is ") + s->form);

    WiringTerm t;
    t.kind = s->kind;
    t.character = int(term_begin) + 1;
    if (t.kind == Kind::layers) read_layers(t, args[0], *s);
    else if (t.kind == Kind::blend) t.a = read_number(args[0], 0, 1, *s);
    else if (t.kind == Kind::act) read_act(t, args, *s);
    else if (t.kind == Kind::rope) t.a = count > 0 ? read_number(args[0], 1, 1e9, *s) : default_rope_base;
    else if (count > 0) t.n = whole_number(args[0], 1, *s);
    if (t.kind == Kind::sla || t.kind == Kind::also) read_heads(t, args[1], *s);
    if (t.kind == Kind::window && count == 2) {
      t.pattern = args[1];
      if (t.pattern.empty() || t.pattern.find_first_not_of("SL") != std::string::npos)
        error("the pattern \"" + t.pattern + "\" must be of the letters S (window) and L (no window)");
    }
    if (t.kind == Kind::lsh) {
      t.c = whole_number(args[1], 1, *s);
      if (t.n > lsh_most_buckets) error(format("%d buckets must be at most %d", t.n, lsh_most_buckets));
      if (t.n % 2 != 0) error(format("%d buckets; they are pairs, so it must be an even number", t.n));
    }
    if (t.kind == Kind::strided && count == 2) t.how = read_how(args[1]);
    if (t.kind == Kind::fixed) {
      t.c = whole_number(args[1], 1, *s);
      if (t.c > t.n) error(format("%d columns of blocks of %d; it must be 1 to %d", t.c, t.n, t.n));
      if (count == 3) t.how = read_how(args[2]);
    }
    return t;
  }

  void read_act(WiringTerm& t, const std::vector<std::string>& args, const TermSyntax& s) const {
    t.a = read_number(args[0], 0, 1, s);
    if (t.a == 0 || t.a == 1) error("eps, " + args[0] + ", must lie between 0 and 1, and be neither");
    t.cost = args.size() > 1 ? read_number(args[1], 0, 1e9, s) : default_ponder_cost;
  }

  double read_number(const std::string& argument, double least, double most, const TermSyntax& s) const {
    const double value = number<double>(argument, s);
    if (!(value >= least && value <= most))
      error(format("%s must lie between %g and %g", argument.c_str(), least, most));
    return value;
  }
};

// A term that decides whose K/V heads attend to, and one that decides whose attention map a layer uses.
bool moves_kv(Kind kind) {
  return kind == Kind::sla || kind == Kind::also || kind == Kind::share || kind == Kind::layers;
}
bool moves_maps(Kind kind) { return kind == Kind::reuse || kind == Kind::blend || kind == Kind::gate; }

bool replaces_positions(Kind kind) { return kind == Kind::rope || kind == Kind::relative; }

// Terms that go with few others: these.
struct RestrictedTerm {
  Kind kind;
  std::vector<Kind> goes_with;
};
const std::vector<RestrictedTerm>& restricted_terms() {
  auto with_sources = [](std::vector<Kind> kinds) {
    kinds.insert(kinds.begin(), {Kind::sla, Kind::also, Kind::share, Kind::layers, Kind::gqa, Kind::window});
    return kinds;
  };
  static const std::vector<RestrictedTerm> terms =
      {{Kind::memory, with_sources({Kind::rope, Kind::relative, Kind::gru})},
       {Kind::relative, with_sources({Kind::memory, Kind::universal, Kind::act, Kind::gru})},
       {Kind::universal, with_sources({Kind::rope, Kind::relative, Kind::act, Kind::gru})},
       {Kind::act, with_sources({Kind::universal, Kind::rope, Kind::relative, Kind::gru})},
       {Kind::lsh, {Kind::gru, Kind::reversible}},
       {Kind::reversible, with_sources({Kind::strided, Kind::fixed, Kind::rope, Kind::lsh})}};
  return terms;
}

bool excludes(const RestrictedTerm& term, Kind other) {
  return other != Kind::rmsnorm &&
         std::find(term.goes_with.begin(), term.goes_with.end(), other) == term.goes_with.end();
}

// What the term combines with, in words.
std::string combinations_of(const RestrictedTerm& term) {
  std::string text = std::string(syntax_of(term.kind).name) + " does with ";
  for (size_t i = 0, n = term.goes_with.size(); i < n; i++)
    text += std::string(i == 0 ? "" : i + 1 < n ? ", " : " and ") + syntax_of(term.goes_with[i]).name;
  return text;
}

[[noreturn]] void term_error(const Wiring& w, const WiringTerm& t, const std::string& what) {
  user_error("wiring \"%s\": %s, at character %d: %s", w.text.c_str(), term_text(t).c_str(), t.character, what.c_str());
}

constexpr size_t most_terms = 1000;  // each is compared with those before it, and applied to every head

// Terms that exclude each other.
void check_combinations(const Wiring& w) {
  for (const WiringTerm& t : w.terms) {
    if (t.kind == Kind::plain && w.terms.size() > 1) term_error(w, t, "is plain GPT-2, alone; leave it out");
    for (const WiringTerm& before : w.terms) {
      if (&before == &t) break;
      auto other = [&] { return format("%s, at character %d", term_text(before).c_str(), before.character); };
      if (before.kind == t.kind && t.kind != Kind::sla && t.kind != Kind::also)
        term_error(w, t, "the term is there already: " + other() + "; only sla and also may be repeated");
      if (moves_maps(t.kind) && moves_maps(before.kind))
        term_error(w, t,
                   "does not combine with " + other() + ": reuse, blend and gate each decide on the attention map");
      if ((moves_maps(t.kind) && moves_kv(before.kind)) || (moves_kv(t.kind) && moves_maps(before.kind)))
        term_error(w, t,
                   "does not combine with " + other() +
                       ": attention maps of other layers need their own layer's keys; "
                       "gqa, topk and masks do combine with reuse, blend and gate");
      for (const RestrictedTerm& term : restricted_terms())
        if ((term.kind == t.kind && excludes(term, before.kind)) ||
            (term.kind == before.kind && excludes(term, t.kind)))
          term_error(w, t, "does not combine with " + other() + ": " + combinations_of(term));
    }
    if (t.kind == Kind::memory && learns_positions(w))
      term_error(w, t, "needs rope or relative: learned positions say nothing of those before a segment");
    if (t.kind == Kind::act && !has_term(w, Kind::universal))
      term_error(w, t, "needs universal: a token halts after a cycle of layers that repeat");
  }
}

// The first term of this kind; null if there is none.
const WiringTerm* term_of(const Wiring& w, Kind kind) {
  const auto found = std::find_if(w.terms.begin(), w.terms.end(), [&](const WiringTerm& t) { return t.kind == kind; });
  return found != w.terms.end() ? &*found : nullptr;
}

}  // namespace

bool learns_positions(const Wiring& w) {
  return std::none_of(w.terms.begin(), w.terms.end(), [](const WiringTerm& t) { return replaces_positions(t.kind); });
}

bool has_term(const Wiring& w, Kind kind) { return term_of(w, kind) != nullptr; }

int stored_layers(const Wiring& w, int num_layers) {
  const WiringTerm* universal = term_of(w, Kind::universal);
  return universal != nullptr ? universal->n : num_layers;
}

int memory_positions(const Wiring& w) {
  const WiringTerm* memory = term_of(w, Kind::memory);
  return memory != nullptr ? memory->n : 0;
}

Wiring parse_wiring(const std::string& text) {
  Wiring w;
  w.text = text;
  w.terms.clear();
  Parser parser = {text};
  for (parser.skip_spaces(); parser.at < text.size(); parser.skip_spaces()) {
    if (w.terms.size() == most_terms) user_error("the wiring has more than %zu terms", most_terms);
    w.terms.push_back(parser.read_term());
  }
  if (w.terms.empty()) user_error("the wiring is empty; plain GPT-2 is \"plain\"");
  check_combinations(w);
  return w;
}

Wiring skip_layer_wiring(int num_skip_layer, int num_skip_head) {
  if (num_skip_head == 0) return Wiring();
  return parse_wiring(format("sla(%d,%d)", num_skip_layer, num_skip_head));
}

Wiring default_wiring(int num_layers, int num_heads) {
  return skip_layer_wiring(num_layers * 3 / 4, num_layers >= 2 ? num_heads * 3 / 4 : 0);
}

void validate(const Wiring& w, int num_layers, int num_heads) {
  for (const WiringTerm& t : w.terms) {
    auto error = [&](const std::string& what) { term_error(w, t, what); };
    switch (t.kind) {
      case Kind::sla:
      case Kind::also:
        if (num_layers == 1) error("a model of 1 layer has no other layer's K/V; plain is what it can be");
        if (t.n > num_layers - 1)
          error(format("of %d layers the source can lie 1 to %d layers below", num_layers, num_layers - 1));
        if (t.last_heads > num_heads)
          error(format("the model has %d heads; it can be 1 to %d of them", num_heads, num_heads));
        if (t.end_head > num_heads)
          error(format("the model has %d heads; a range can end at %d", num_heads, num_heads));
        break;
      case Kind::share:
      case Kind::reuse:
        if (t.n > num_layers)
          error(format("the model has %d layers; a group can have 1 to %d", num_layers, num_layers));
        break;
      case Kind::layers:
        if (int(t.layers.size()) != num_layers)
          error(format("it names %zu layers; the model has %d", t.layers.size(), num_layers));
        break;
      case Kind::universal:
        if (num_layers % t.n != 0) error(format("cycles of %d layers do not divide the %d layers", t.n, num_layers));
        break;
      case Kind::gqa:
        if (num_heads % t.n != 0) {
          std::string divisors;
          for (int k = 1; k <= num_heads; k++)
            if (num_heads % k == 0) divisors += (divisors.empty() ? "" : ", ") + std::to_string(k);
          error(format("%d K/V heads do not divide %d heads; these do: %s", t.n, num_heads, divisors.c_str()));
        }
        break;
      default: break;
    }
  }
}

std::string canonical_text(const Wiring& w) {
  std::string text;
  for (const WiringTerm& t : w.terms) text += (text.empty() ? "" : " ") + term_text(t);
  return text;
}

namespace {

// Hides what window, strided or fixed hides from a head: A1 and A2 are the Sparse Transformer's masks.
void add_term(AttentionMask& mask, const WiringTerm& t, int layer, int head, int num_heads) {
  const bool is_first = t.how == How::heads ? head < (num_heads + 1) / 2 : layer % 2 == 0;
  const bool a1 = t.how == How::both || is_first, a2 = t.how == How::both || !is_first;
  MaskClause clause;
  if (t.kind == Kind::window && (t.pattern.empty() || t.pattern[layer % t.pattern.size()] == 'S')) clause.last = t.n;
  if (t.kind == Kind::strided) clause.s = t.n, clause.last = a1 ? t.n + 1 : 0, clause.residue = a2;
  if (t.kind == Kind::fixed) clause.s = t.n, clause.block = a1, clause.columns = a2 ? t.c : 0;
  if (clause.has_interval() || clause.recurs()) mask.add(clause);
}

}  // namespace

WiringTable wiring_table(const Wiring& w, int num_layers, int num_heads) {
  WiringTable table;
  table.num_layers = num_layers, table.num_heads = table.num_kv_heads = num_heads;
  for (int l = 0; l < num_layers; l++) {
    table.map_layer.push_back(l);
    table.source_layers.insert(table.source_layers.end(), size_t(num_heads), {l});
  }
  table.masks.resize(size_t(num_layers * num_heads));
  for (const WiringTerm& t : w.terms) {
    const int first_head = t.last_heads > 0 ? num_heads - t.last_heads : t.first_head;
    const int end_head = t.last_heads > 0 ? num_heads : t.end_head;
    for (int l = 0; l < num_layers; l++) {
      for (int i = 0; i < num_heads; i++) {
        std::vector<int>& sources = table.source_layers[l * num_heads + i];
        const bool is_meant = l >= t.n && first_head <= i && i < end_head;  // by sla and also
        if (t.kind == Kind::sla && is_meant) sources = {l - t.n};
        if (t.kind == Kind::also && is_meant && std::find(sources.begin(), sources.end(), l - t.n) == sources.end())
          sources.push_back(l - t.n);
        if (t.kind == Kind::share) sources = {l / t.n * t.n};
        if (t.kind == Kind::layers) sources = {t.layers[l]};
        add_term(table.masks[l * num_heads + i], t, l, i, num_heads);
      }
      if (t.kind == Kind::reuse) table.map_layer[l] = l / t.n * t.n;
    }
    if (t.kind == Kind::gqa) table.num_kv_heads = t.n;
    if (t.kind == Kind::topk) table.topk = t.n;
    if (t.kind == Kind::blend) table.mix = WiringTable::Mix::blend, table.blend = t.a;
    if (t.kind == Kind::gate) table.mix = WiringTable::Mix::gate;
    if (t.kind == Kind::rope) table.rope = t.a;
    if (t.kind == Kind::relative) table.relative = true;
    if (t.kind == Kind::act) table.halting = t.a, table.ponder_cost = t.cost;
    if (t.kind == Kind::rmsnorm) table.rmsnorm = true;
    if (t.kind == Kind::gru) table.gru = true;
    if (t.kind == Kind::reversible) table.reversible = true;
    if (t.kind == Kind::lsh) table.lsh_buckets = t.n, table.lsh_rounds = t.c;
  }
  table.memory = memory_positions(w), table.stored_layers = stored_layers(w, num_layers);
  table.has_cycles = has_term(w, Kind::universal);
  for (std::vector<int>& sources : table.source_layers) std::sort(sources.begin(), sources.end());
  return table;
}
