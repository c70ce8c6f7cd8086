#include "learned_sources.h"
#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>
#include <string_view>
#include "llmc/io/model_file.h"
#include "llmc/utils/error.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"

std::vector<double> LearnedSources::router_shares(int layer, int kv_head) const {
  if (layer == 0) return {1};
  std::vector<double> shares(size_t(layer) + 1, 0);
  const size_t kv = size_t(num_kv_heads), first = size_t(kv_head) * shares.size() * kv;
  double sum = 0;
  for (size_t i = 0; i < shares.size() * kv; i++) {
    const double weight = std::fabs(double(router[size_t(layer)][first + i]));
    shares[i / kv] += weight, sum += weight;
  }
  for (double& share : shares) share /= std::max(sum, 1e-300);
  return shares;
}

LearnedSources read_learned_sources(const std::string& folder, const ModelConfig& config) {
  const WiringTable table = config.wiring_table();
  LearnedSources s = {config.num_layers, table.num_kv_heads, {}, {}};
  const std::vector<std::string> files = weight_files(folder);
  const int64_t kv = table.num_kv_heads;
  auto read = [&](int layer, const char* name, int64_t size) {
    return read_tensor(files, {"h." + std::to_string(layer) + "." + name, {size}});
  };
  for (int l = 0; l < config.num_layers; l++) {
    if (table.router) s.router.push_back(l > 0 ? read(l, "attn.router", kv * (l + 1) * kv) : std::vector<float>());
    if (table.dense) s.dense.push_back(read(l, "dense", l + 2));
  }
  return s;
}

// ----------------------------------------------------------------------------
// CSV

namespace {

constexpr const char* csv_head = "term,layer,head,source,source_head,weight";

// What a line is about: a term, a layer, a K/V head, a source layer and its K/V head.
struct Place {
  std::string term;
  std::array<int, 4> numbers;
  bool operator==(const Place& o) const { return term == o.term && numbers == o.numbers; }
};

// Calls visit(place, weight) for each weight, in the order of the file's lines.
template <class Sources, class Visit>
void visit_weights(Sources& s, Visit visit) {
  for (int l = 1; l < int(s.router.size()); l++)
    for (int g = 0, n = 0; g < s.num_kv_heads; g++)
      for (int j = 0; j <= l; j++)
        for (int i = 0; i < s.num_kv_heads; i++, n++)
          visit(Place{"router", {l, g, j, i}}, s.router[size_t(l)][size_t(n)]);
  for (int l = 0; l < int(s.dense.size()); l++)
    for (int j = 0; j <= l + 1; j++) visit(Place{"dense", {l + 1, 0, j, 0}}, s.dense[size_t(l)][size_t(j)]);
}

}  // namespace

std::string learned_sources_csv(const LearnedSources& s) {
  std::string csv = csv_head + std::string("\n");
  visit_weights(s, [&](const Place& p, float weight) {
    csv += p.term;
    for (int number : p.numbers) csv += "," + std::to_string(number);
    csv += "," + shortest(double(weight)) + "\n";
  });
  return csv;
}

LearnedSources parse_learned_sources(const std::string& path, const std::string& csv) {
  const std::vector<std::string> lines = lines_of(csv);
  size_t number = 0;
  auto check = [&](bool is_right, const char* what) {
    if (!is_right)
      user_error("%s:%zu: is not a line of learned sources, as evaluate_gpt2_sla --sources writes them: %s",
                 path.c_str(), number + 1, what);
  };
  check(!lines.empty() && lines[0] == csv_head, csv_head);
  std::vector<std::pair<Place, float>> weights;
  LearnedSources s;
  int router_layers = 0, dense_layers = 0;
  constexpr int most = 4096;  // layers, and heads: more than any model has
  for (number = 1; number < lines.size(); number++) {
    std::istringstream cells(lines[number]);
    Place place;
    auto next = [&](char end) {
      std::string cell;
      std::getline(cells, cell, end);
      return cell;
    };
    place.term = next(',');
    check(place.term == "router" || place.term == "dense", "it begins with router or dense");
    try {
      for (int& n : place.numbers) n = parse_number<int>(next(','));
      weights.push_back({place, parse_number<float>(next('\n'))});
    } catch (const UserError& e) { check(false, e.what()); }
    const auto [layer, head, source, source_head] = place.numbers;
    check(1 <= layer && layer < most && 0 <= head && head < most, "layers begin at 1, heads at 0");
    (place.term == "router" ? router_layers : dense_layers) = layer;
    if (place.term == "router") s.num_kv_heads = std::max(s.num_kv_heads, head + 1);
  }
  number = lines.size();
  check(!weights.empty() && csv.back() == '\n', "the file is incomplete");
  check(router_layers == 0 || dense_layers == 0 || dense_layers == router_layers + 1, "router and dense are of the "
                                                                                      "same layers");
  s.num_layers = std::max(router_layers + 1, dense_layers);
  const int64_t kv = s.num_kv_heads, L = s.num_layers;
  check((router_layers > 0 ? kv * kv * (L * (L + 1) / 2 - 1) : 0) + (dense_layers > 0 ? L * (L + 3) / 2 : 0) ==
            int64_t(weights.size()),
        "each weight stands there once");
  for (int64_t l = 0; l < L; l++) {
    if (router_layers > 0) s.router.push_back(std::vector<float>(l > 0 ? size_t(kv * (l + 1) * kv) : 0));
    if (dense_layers > 0) s.dense.push_back(std::vector<float>(size_t(l) + 2));
  }
  number = 1;
  visit_weights(s, [&](const Place& place, float& weight) {
    check(weights[number - 1].first == place, "layers, heads and sources ascend");
    weight = weights[number++ - 1].second;
  });
  return s;
}

// ----------------------------------------------------------------------------
// The nearest wirings

namespace {

// (L, h, L): of each head of a model the share of each layer in the K/V that it attends to.
using HeadShares = std::vector<std::vector<std::vector<double>>>;

HeadShares head_shares(const LearnedSources& s, const WiringTable& t) {
  HeadShares shares(size_t(t.num_layers), std::vector<std::vector<double>>(size_t(t.num_heads)));
  for (int l = 0; l < t.num_layers; l++)
    for (int i = 0; i < t.num_heads; i++) {
      std::vector<double>& of_head = shares[size_t(l)][size_t(i)];
      of_head.resize(size_t(t.num_layers), 0);
      const std::vector<KVSource>& sources = t.sources(l, i);
      for (const KVSource& source : sources)
        for (int layer : {source.k, source.v}) {
          const std::vector<double> of_source = s.router_shares(layer, t.kv_head(i));
          for (size_t j = 0; j < of_source.size(); j++) of_head[j] += of_source[j] / (2.0 * double(sources.size()));
        }
    }
  return shares;
}

// The share of the weight that lies where the heads of a wiring look, on the average of heads and layers from 1 on.
double kept_share(const HeadShares& shares, const WiringTable& t) {
  double sum = 0;
  for (int l = 1; l < t.num_layers; l++)
    for (int i = 0; i < t.num_heads; i++) sum += shares[size_t(l)][size_t(i)][size_t(t.sources(l, i)[0].k)];
  return sum / std::max(1.0, double(t.num_layers - 1) * t.num_heads);
}

// The terms of a wiring but for `router` and those that say whose K/V heads use.
std::string other_terms(const Wiring& w) {
  Wiring others = {"", {}};
  for (const WiringTerm& term : w.terms)
    if (const TermInfo info = info_of(term); info.syntax.name() != "router" && !(info.sets & Feature::sources))
      others.terms.push_back(term);
  return canonical_text(others);
}

}  // namespace

std::vector<NearWiring> nearest_wirings(const LearnedSources& s, const Wiring& w, int num_heads) {
  const int L = s.num_layers, h = num_heads;
  if (s.router.empty() || L < 2) return {};
  const HeadShares shares = head_shares(s, wiring_table(w, L, h));
  const std::string others = other_terms(w);
  auto near = [&](const std::string& terms) {
    const std::string text = others + (others.empty() || terms.empty() ? "" : " ") + terms;
    const std::string whole = text.empty() ? "plain" : text;
    return NearWiring{whole, kept_share(shares, wiring_table(parse_wiring(whole), L, h))};
  };
  auto better = [](NearWiring& best, const NearWiring& other) {
    if (other.share > best.share + 1e-9) best = other;
  };
  std::string layers;
  for (int l = 0; l < L; l++) {
    std::vector<double> sums(size_t(L), 0);
    for (int i = 0; i < h; i++)
      for (int j = 0; j < L; j++) sums[size_t(j)] += shares[size_t(l)][size_t(i)][size_t(j)];
    const auto largest = std::max_element(sums.rbegin(), sums.rend());  // of equal ones the highest layer
    layers += (l > 0 ? "_" : "") + std::to_string(int(sums.rend() - largest) - 1);
  }
  NearWiring of_last = near("");
  std::vector<NearWiring> all = {of_last};
  for (int distance = 1; distance < L; distance++)
    for (int heads = 1; heads <= h; heads++) better(of_last, near(format("sla(%d,%d)", distance, heads)));
  all.push_back(of_last);
  all.push_back(near("layers(" + layers + ")"));
  std::string ranges;
  for (NearWiring best = near(""), before = {"", -1}; ranges.size() < 200 && best.share > before.share;) {
    before = best;
    std::string longer = ranges;
    for (int distance = 1; distance < L; distance++)
      for (int first = 0; first < h; first++)
        for (int end = first + 1; end <= h; end++) {
          const std::string terms =
              ranges + (ranges.empty() ? "" : " ") + format("sla(%d,%d:%d)", distance, first, end);
          if (const NearWiring other = near(terms); other.share > best.share + 1e-3) best = other, longer = terms;
        }
    ranges = longer;
  }
  if (!ranges.empty()) all.push_back(near(ranges));
  auto equal = [](const NearWiring& a, const NearWiring& b) { return std::fabs(a.share - b.share) < 1e-9; };
  std::sort(all.begin(), all.end(), [&](const NearWiring& a, const NearWiring& b) {
    return equal(a, b) ? a.text.size() < b.text.size() : a.share > b.share;
  });
  all.erase(std::unique(all.begin(), all.end(), equal), all.end());
  std::reverse(all.begin(), all.end());
  return all;
}

// ----------------------------------------------------------------------------
// For people

namespace {

// A triangle of numbers: of each row as many as it has columns, the lowest row first.
struct Triangle {
  std::string title;
  std::vector<std::string> row_names;
  std::vector<std::vector<double>> rows;
};

Triangle router_triangle(const LearnedSources& s, const std::string& title, int first_head, int end_head) {
  Triangle t = {title, {}, {}};
  for (int l = 0; l < s.num_layers; l++) {
    std::vector<double> mean(size_t(l) + 1, 0);
    for (int g = first_head; g < end_head; g++) {
      const std::vector<double> shares = s.router_shares(l, g);
      for (size_t j = 0; j < mean.size(); j++) mean[j] += shares[j] / (end_head - first_head);
    }
    t.row_names.push_back(format("layer %d", l)), t.rows.push_back(mean);
  }
  return t;
}

std::vector<Triangle> triangles_of(const LearnedSources& s, bool each_head) {
  std::vector<Triangle> all;
  if (!s.router.empty()) {
    all.push_back(router_triangle(s, "router: shares of layers, mean over K/V heads", 0, s.num_kv_heads));
    for (int g = 0; each_head && g < s.num_kv_heads; g++)
      all.push_back(router_triangle(s, format("K/V head %d", g), g, g + 1));
  }
  if (!s.dense.empty()) {
    Triangle t = {"dense: weights of embeddings (0) and layers (from 1 on)", {}, {}};
    for (size_t l = 0; l < s.dense.size(); l++) {
      t.row_names.push_back(l + 1 < s.dense.size() ? format("layer %zu", l + 1) : "ln_f");
      t.rows.push_back({s.dense[l].begin(), s.dense[l].end()});
    }
    all.push_back(t);
  }
  return all;
}

}  // namespace

std::string learned_sources_text(const LearnedSources& s, const Wiring& w, int num_heads) {
  std::string text;
  for (const Triangle& t : triangles_of(s, /*each_head=*/false)) {
    text += t.title + "\n" + format("%9s", "");
    for (size_t j = 0; j < t.rows.back().size(); j++) text += format(" %6zu", j);
    text += "\n";
    for (size_t l = t.rows.size(); l-- > 0;) {
      text += format("%-9s", t.row_names[l].c_str());
      for (double x : t.rows[l]) text += format(" %6.3f", x);
      text += "\n";
    }
  }
  if (s.router.empty()) return text;
  text += "router: the layer with the largest share, and that share, of each K/V head\n";
  for (int l = s.num_layers - 1; l > 0; l--) {
    text += format("%-9s", format("layer %d", l).c_str());
    for (int g = 0; g < s.num_kv_heads; g++) {
      const std::vector<double> shares = s.router_shares(l, g);
      const auto largest = std::max_element(shares.begin(), shares.end());
      text += format(" %3d %.2f", int(largest - shares.begin()), *largest);
    }
    text += "\n";
  }
  text += "share of the router's weight  wiring\n";
  for (const NearWiring& near : nearest_wirings(s, w, num_heads))
    text += format("%28.3f  %s\n", near.share, near.text.c_str());
  return text;
}

std::string learned_sources_picture(const LearnedSources& s) {
  constexpr int gap = 14, title_height = 18, label_width = 52, page_width = 900;
  std::string svg;
  double x = 0, y = 0, row_height = 0, width = 0;
  bool is_first = true;
  for (const Triangle& t : triangles_of(s, /*each_head=*/true)) {
    const bool is_large = is_first || begins_with(t.title, "dense");
    const double cell = is_large ? 22 : 10, columns = double(t.rows.back().size());
    const double left = is_large ? label_width : 0;
    const double own_width = std::max(left + cell * columns, is_large ? 380.0 : 64.0);
    const double own_height = title_height + cell * double(t.rows.size()) + gap;
    if (x > 0 && (is_large || x + own_width > page_width)) x = 0, y += row_height, row_height = 0;
    double largest = 1e-30;
    for (const std::vector<double>& row : t.rows)
      for (double value : row) largest = std::max(largest, std::fabs(value));
    svg += format("<text x=\"%g\" y=\"%g\" style=\"font-size:12px;fill:var(--ink)\">%s</text>\n", x, y + 12,
                  t.title.c_str());
    for (size_t l = 0; l < t.rows.size(); l++) {
      const double top = y + title_height + cell * double(t.rows.size() - 1 - l);
      if (is_large)
        svg += format("<text x=\"%g\" y=\"%g\" text-anchor=\"end\" "
                      "style=\"font-size:11px;fill:var(--quiet)\">%s</text>",
                      x + label_width - 6, top + 15, t.row_names[l].c_str());
      for (size_t j = 0; j < t.rows[l].size(); j++) {
        const double value = t.rows[l][j];
        svg += format("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" style=\"fill:var(--source-%d);"
                      "fill-opacity:%.3f;stroke:var(--cell)\"><title>%s, %zu: %.4f</title></rect>",
                      x + left + cell * double(j), top, cell - 1, cell - 1, value < 0 ? 1 : 0,
                      std::fabs(value) / largest, t.row_names[l].c_str(), j, value);
      }
      svg += "\n";
    }
    row_height = std::max(row_height, own_height), width = std::max(width, x + own_width), x += own_width + gap;
    if (is_large) x = 0, y += row_height, row_height = 0;
    is_first = false;
  }
  y += row_height;
  return svg.empty() ? ""
                     : format("<svg viewBox=\"0 0 %g %g\" style=\"width:%gpx;max-width:100%%\">\n", width, y, width) +
                           svg + "</svg>\n";
}
