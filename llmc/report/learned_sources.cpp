#include "learned_sources.h"
#include <algorithm>
#include <cmath>
#include "llmc/formats/checkpoint.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "wiring_picture.h"

std::vector<double> LearnedSources::router_shares(int layer, int kv_head, bool as_a_wiring) const {
  if (layer == 0) return {1};
  std::vector<double> shares(size_t(layer) + 1, 0);
  const size_t kv = size_t(num_kv_heads), first = size_t(kv_head) * shares.size() * kv;
  double sum = 0;
  for (size_t i = 0; i < shares.size() * kv; i++) {
    const double weight = double(router[size_t(layer)][first + i]);
    if (!as_a_wiring || (i % kv == size_t(kv_head) && weight > 0)) shares[i / kv] += std::fabs(weight);
    sum += std::fabs(weight);
  }
  for (double& share : shares) share /= std::max(sum, 1e-300);
  return shares;
}

LearnedSources read_learned_sources(const std::string& folder, const ModelConfig& config) {
  const WiringTable table = config.wiring_table();
  const int64_t kv = table.num_kv_heads;
  LearnedSources s = {config.num_layers, table.num_kv_heads, {}, {}};
  if (!table.router && !table.dense) return s;
  verify_model(folder);
  std::vector<SafetensorsSpec> specs;
  std::vector<std::vector<float>*> places;  // of the tensors' values
  auto add = [&](int layer, const char* name, int64_t size, std::vector<float>& values) {
    specs.push_back({"h." + std::to_string(layer) + "." + name, {size}}), places.push_back(&values);
  };
  if (table.router) s.router.resize(size_t(config.num_layers));
  if (table.dense) s.dense.resize(size_t(config.num_layers));
  for (int l = 0; l < config.num_layers; l++) {
    if (table.router && l > 0) add(l, "attn.router", kv * (l + 1) * kv, s.router[size_t(l)]);
    if (table.dense) add(l, "dense", l + 2, s.dense[size_t(l)]);
  }
  std::vector<std::vector<float>> values = read_tensors(weight_files(folder), specs);
  for (size_t i = 0; i < places.size(); i++) {
    if (!std::all_of(values[i].begin(), values[i].end(), [](float weight) { return std::isfinite(weight); }))
      user_error("%s: tensor %s has weights that are NaN or infinite; take a checkpoint from before they became so",
                 folder, specs[i].name);
    *places[i] = std::move(values[i]);
  }
  return s;
}

// ----------------------------------------------------------------------------
// The nearest wirings

namespace {

// (L, h, L): for each head of a model the share of each layer's head of the same number in the K/V that it attends to.
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
          const std::vector<double> of_source = s.router_shares(layer, t.kv_head(i), /*as_a_wiring=*/true);
          for (size_t j = 0; j < of_source.size(); j++) of_head[j] += of_source[j] / (2.0 * double(sources.size()));
        }
    }
  return shares;
}

// (L, h): the layer whose K/V each head attends to.
using Sources = std::vector<std::vector<int>>;

// The share of the weight that lies there, on the average of heads and layers from 1 on.
double kept_share(const HeadShares& shares, const Sources& sources) {
  double sum = 0, count = 0;
  for (size_t l = 1; l < sources.size(); l++)
    for (size_t i = 0; i < sources[l].size(); i++, count++) sum += shares[l][i][size_t(sources[l][i])];
  return sum / count;
}

// The arguments of sla(distance, first:end), and by how much it raises the sum of shares.
struct HeadRange {
  int distance, first, end;
  double gain;

  void apply(Sources& sources) const {
    for (size_t l = size_t(distance); l < sources.size(); l++)
      for (int i = first; i < end; i++) sources[l][size_t(i)] = int(l) - distance;
  }
  std::string text() const { return format("sla(%d,%d:%d)", distance, first, end); }
};

// The range that raises the sum most, the shortest of equal ones; with up_to_last only ranges that end with the last
// head count. Its gain is 0 if none raises it.
HeadRange best_range(const HeadShares& shares, const Sources& sources, bool up_to_last) {
  const int L = int(sources.size()), h = int(sources[0].size());
  HeadRange best = {1, 0, 0, 0};
  for (int distance = 1; distance < L; distance++) {
    std::vector<double> sums = {0};  // of the gains of the heads before each
    for (size_t i = 0; i < size_t(h); i++) {
      sums.push_back(sums.back());
      for (size_t l = size_t(distance); l < size_t(L); l++)
        sums.back() += shares[l][i][l - size_t(distance)] - shares[l][i][size_t(sources[l][i])];
    }
    for (int end = up_to_last ? h : 1; end <= h; end++)
      for (int first = end - 1; first >= 0; first--)
        if (const double gain = sums[size_t(end)] - sums[size_t(first)]; gain > best.gain + 1e-9)
          best = {distance, first, end, gain};
  }
  return best;
}

// For each layer, the layer up to it that has the largest share over all heads, the highest of equal ones.
Sources best_layers(const HeadShares& shares) {
  const size_t L = shares.size(), h = shares[0].size();
  Sources sources;
  for (size_t l = 0; l < L; l++) {
    std::vector<double> sums(l + 1, 0);
    for (size_t i = 0; i < h; i++)
      for (size_t j = 0; j <= l; j++) sums[j] += shares[l][i][j];
    const auto largest = std::max_element(sums.rbegin(), sums.rend());
    sources.push_back(std::vector<int>(h, int(sums.rend() - largest) - 1));
  }
  return sources;
}

// The terms of a wiring but for `router` and those that say whose K/V heads use.
std::string other_terms(const Wiring& w) {
  Wiring others;
  others.terms.clear();
  for (const WiringTerm& term : w.terms)
    if (const TermInfo info = info_of(term); info.syntax.name() != "router" && !(info.sets & Feature::sources))
      others.terms.push_back(term);
  return canonical_text(others);
}

}  // namespace

std::vector<NearWiring> nearest_wirings(const LearnedSources& s, const Wiring& w, int num_heads) {
  const int L = s.num_layers, h = num_heads;
  if (s.router.empty() || L < 2) return {};
  const WiringTable table = wiring_table(w, L, h);
  if (table.num_kv_heads != s.num_kv_heads) return {};
  const HeadShares shares = head_shares(s, table);
  const std::string others = other_terms(w);
  std::vector<NearWiring> all;
  auto add = [&](const std::string& terms, const Sources& sources) {
    const std::string text = others + (others.empty() || terms.empty() ? "" : " ") + terms;
    // Rounded, so that the same share is the same number in whichever order it was added up.
    all.push_back({text.empty() ? "plain" : text, std::round(kept_share(shares, sources) * 1e9) * 1e-9});
  };
  Sources own;
  for (int l = 0; l < L; l++) own.push_back(std::vector<int>(size_t(h), l));
  add("", own);

  Sources of_last = own;
  const HeadRange last = best_range(shares, own, /*up_to_last=*/true);
  last.apply(of_last);
  if (last.gain > 0) add(format("sla(%d,%d)", last.distance, h - last.first), of_last);

  const Sources of_layers = best_layers(shares);
  std::string layers;
  for (const std::vector<int>& heads : of_layers) layers += (layers.empty() ? "" : "_") + std::to_string(heads[0]);
  add("layers(" + layers + ")", of_layers);

  constexpr int most_ranges = 16;  // a longer text is no wiring that anybody reads
  Sources of_ranges = own;
  std::string ranges;
  for (int i = 0; i < most_ranges; i++) {
    const HeadRange range = best_range(shares, of_ranges, /*up_to_last=*/false);
    if (range.gain < 1e-3 * double(L - 1) * h) break;
    range.apply(of_ranges), ranges += (i > 0 ? " " : "") + range.text();
  }
  if (!ranges.empty()) add(ranges, of_ranges);

  std::sort(all.begin(), all.end(), [](const NearWiring& a, const NearWiring& b) {
    return a.share == b.share ? a.text.size() < b.text.size() : a.share > b.share;
  });
  auto equal = [](const NearWiring& a, const NearWiring& b) { return a.share == b.share; };
  all.erase(std::unique(all.begin(), all.end(), equal), all.end());
  std::reverse(all.begin(), all.end());
  return all;
}

// ----------------------------------------------------------------------------
// The picture

namespace {

// What the sums of layers are made of: a row a layer, the lowest first, with the shares or weights of the layers whose
// sum it is.
struct SourceMap {
  std::string title;
  std::vector<std::string> row_names;
  std::vector<std::vector<double>> rows;
};

// The shares of the router, means over K/V heads [first, end).
SourceMap router_map(const LearnedSources& s, const std::string& title, int first, int end) {
  SourceMap map = {title, {}, {}};
  for (int l = 0; l < s.num_layers; l++) {
    std::vector<double> mean(size_t(l) + 1, 0);
    for (int g = first; g < end; g++) {
      const std::vector<double> shares = s.router_shares(l, g);
      for (size_t j = 0; j < mean.size(); j++) mean[j] += shares[j] / (end - first);
    }
    map.row_names.push_back(format("layer %d", l)), map.rows.push_back(mean);
  }
  return map;
}

SourceMap dense_map(const LearnedSources& s) {
  SourceMap map = {"dense: weights of the embeddings (0) and of layers (from 1 on)", {}, {}};
  for (size_t l = 0; l < s.dense.size(); l++) {
    map.row_names.push_back(l + 1 < s.dense.size() ? format("layer %zu", l + 1) : "ln_f");
    map.rows.push_back({s.dense[l].begin(), s.dense[l].end()});
  }
  return map;
}

// The maps of whole layers.
std::vector<SourceMap> layer_maps(const LearnedSources& s) {
  std::vector<SourceMap> maps;
  if (!s.router.empty())
    maps.push_back(router_map(s, "router: shares of layers in |weights|, mean over K/V heads", 0, s.num_kv_heads));
  if (!s.dense.empty()) maps.push_back(dense_map(s));
  return maps;
}

constexpr int large_cell = 22, small_cell = 10, gap = 14, title_height = 18, name_width = 52, page_width = 900;

double height_of(const SourceMap& map, int cell) { return title_height + cell * double(map.rows.size()) + gap; }

// The map with its upper left corner at (x, y); names of rows where cells are large. The largest number is opaque, and
// negative ones have another colour.
std::string drawn(const SourceMap& map, double x, double y, int cell) {
  double largest = 1e-30;
  for (const std::vector<double>& row : map.rows)
    for (double value : row) largest = std::max(largest, std::fabs(value));
  const double left = x + (cell == large_cell ? name_width : 0);
  std::string svg = svg_text(x, y + 12, "start", map.title, "--ink");
  std::string cells;
  for (size_t l = 0; l < map.rows.size(); l++) {
    const double top = y + title_height + cell * double(map.rows.size() - 1 - l);
    if (cell == large_cell) svg += svg_text(left - 6, top + 15, "end", map.row_names[l], "--quiet", 11);
    for (size_t j = 0; j < map.rows[l].size(); j++) {
      const double value = map.rows[l][j];
      cells += format("<rect x=\"%g\" y=\"%g\" width=\"%d\" height=\"%d\" fill-opacity=\"%.2f\"%s>"
                      "<title>%s, %zu: %.4f</title></rect>",
                      left + cell * double(j), top, cell - 1, cell - 1, std::fabs(value) / largest,
                      value < 0 ? " style=\"fill:var(--source-1)\"" : "", map.row_names[l].c_str(), j, value);
    }
    cells += "\n";
  }
  return svg + "<g style=\"fill:var(--source-0);stroke:var(--cell)\">\n" + cells + "</g>\n";
}

}  // namespace

std::string learned_sources_picture(const LearnedSources& s) {
  constexpr double most_cells = 200000;  // about 100 bytes each
  if (0.5 * s.num_layers * s.num_layers * (s.num_kv_heads + 1) > most_cells)
    return format("<p>%d layers of %d K/V heads are too many to be drawn.</p>\n", s.num_layers, s.num_kv_heads);
  std::string svg;
  double y = 0, width = page_width;
  for (const SourceMap& map : layer_maps(s)) {
    svg += drawn(map, 0, y, large_cell);
    y += height_of(map, large_cell),
        width = std::max(width, name_width + double(large_cell) * double(map.rows.back().size()));
  }
  const int pitch = std::max(64, small_cell * s.num_layers) + gap, a_row = std::max(1, page_width / pitch);
  for (int g = 0; g < s.num_kv_heads && !s.router.empty(); g++) {
    const SourceMap map = router_map(s, format("K/V head %d", g), g, g + 1);
    svg += drawn(map, g % a_row * pitch, y, small_cell);
    if (g % a_row == a_row - 1 || g + 1 == s.num_kv_heads) y += height_of(map, small_cell);
  }
  return format("<svg viewBox=\"0 0 %g %g\" style=\"width:%gpx;max-width:100%%\">\n", width, y, width) + svg +
         "</svg>\n";
}
