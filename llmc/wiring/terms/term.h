// What all terms of a wiring have in common. A term is a struct in a file of its own, which terms/all.h lists. It has a
// syntax, a line of help, and features, from which what combines with what follows. Its functions, besides those that
// struct Term has for terms without arguments and limits:
//
//   read(TermReader)      takes its arguments from a text, or throws UserError, which says what would be right
//   arguments()           these as they are written, without what a reader may leave out; "" if there are none
//   misfit(L, h)          what is wrong with it in a model of L layers and h heads; "" if nothing is
//   apply(WiringTable&)   what it changes
#pragma once
#include <cstring>
#include <string>
#include <vector>
#include "llmc/wiring/wiring_table.h"
#include "llmc/base/error.h"
#include "llmc/base/number.h"
#include "llmc/base/text.h"

// What a term decides on: a set of these.
struct Feature {
  enum Set : unsigned {
    sources = 1 << 0,       // whose K/V heads attend to
    kv_heads = 1 << 1,      // how many K/V heads there are
    windows = 1 << 2,       // masks of neighbouring keys
    patterns = 1 << 3,      // masks of keys that recur
    top_keys = 1 << 4,      // which keys have the highest scores
    maps = 1 << 5,          // whose attention map a layer uses
    positions = 1 << 6,     // how positions are known without learned ones
    distances = 1 << 7,     // scores of distances beside the keys' scores
    segments = 1 << 8,      // which positions before a segment are seen
    cycles = 1 << 9,        // which layers repeat
    halting = 1 << 10,      // after which cycle a token stops
    joins = 1 << 11,        // how branches join the residual stream
    hashing = 1 << 12,      // masks that follow from queries
    norms = 1 << 13,        // what is computed before each branch and before the head
    head_norms = 1 << 14,   // what is done to q and k of each head before they are multiplied
    activations = 1 << 15,  // what MLPs make of hidden units
    heads = 1 << 16,        // whose weight the output head has
    caps = 1 << 17,         // how large logits are
    documents = 1 << 18,    // masks that follow from tokens
    values = 1 << 19,       // what is made of values before they are used
    inputs = 1 << 20,       // what a layer takes of those below
    no_key = 1 << 21,       // what a softmax has beside keys
    routes = 1 << 22,       // whose K/V a layer uses in an update
    unroutable = 1 << 23    // sources whose place another layer's K/V, drawn for an update, could not take
  };
};

struct TermFeatures {
  unsigned sets = 0, excludes = 0, needs = 0;  // of its own, and of other terms
  const char *why_excludes = "", *why_needs = "";
};

struct TermSyntax {
  const char *form, *examples = "";  // the form begins with the name
  int least_arguments = 0, most_arguments = 0;

  std::string name() const { return std::string(form, strcspn(form, " (")); }
  std::string text() const { return std::string(form) + (*examples ? ", such as " : "") + examples; }
};

// A term as it stands in a wiring's text, and its arguments without the spaces around them.
struct TermReader {
  const std::string& wiring;
  size_t begin, end;
  TermSyntax syntax = {};
  std::vector<std::string> arguments = {};

  std::string text() const { return wiring.substr(begin, end - begin); }
  int count() const { return int(arguments.size()); }
  const std::string& operator[](int i) const { return arguments[size_t(i)]; }

  [[noreturn]] void error(const std::string& what) const {
    user_error("wiring \"%s\": %s, at character %zu: %s", wiring.c_str(), text().c_str(), begin + 1, what.c_str());
  }
  template <class T>
  T parsed(const std::string& argument) const {
    try {
      return parse_number<T>(argument);
    } catch (const UserError& e) { error(format("%s; it is %s", e.what(), syntax.text().c_str())); }
  }
  int whole(const std::string& argument, int least) const {
    const int value = parsed<int>(argument);
    if (value < least || value > 1 << 30) error(format("%d must be at least %d, and at most 2^30", value, least));
    return value;
  }
  double number(const std::string& argument, double least, double most) const {
    const double value = parsed<double>(argument);
    if (!(value >= least && value <= most))
      error(format("%s must lie between %g and %g", argument.c_str(), least, most));
    return value;
  }
};

// The members of a term that sets nothing else.
struct Term : Feature {
  static constexpr TermFeatures features = {};
  static constexpr bool may_be_repeated = false;
  int character = 1;    // where it, or the word that is short for it, begins in the text, counted from 1
  const char* of = "";  // that word

  void read(const TermReader&) {}
  std::string arguments() const { return ""; }
  std::string misfit(int, int) const { return ""; }
  // Whether it changes the sources of keys or of values alone.
  bool moves_one_part() const { return false; }
  // The most attentions that a head has because of it beside its own, on the average of so many layers.
  double more_attentions(int) const { return 0; }
};

// A term that sets one member of the table, and has the note that drawings print of it. T: the term.
template <class T, auto member, auto value = true>
struct SettingTerm : Term {
  void apply(WiringTable& t) const {
    t.*member = value;
    t.notes.push_back(T::note);
  }
};

// A term of one whole number, at least 1.
struct NumberTerm : Term {
  int n = 1;

  void read(const TermReader& a) { n = a.whole(a[0], 1); }
  std::string arguments() const { return std::to_string(n); }
};
