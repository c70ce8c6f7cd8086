#include "wiring_picture.h"
#include <algorithm>
#include <map>
#include "attention_plan.h"
#include "llmc/utils/error.h"

namespace {

enum class Kind { own, source, below, several, map };

struct Head {
  Kind kind;
  std::string text;  // in the cell
  int layer;         // the layer whose K/V, or attention map, it uses: gives the colour
  bool is_masked;
};

constexpr int cell = 22, step = 25, left = 62, top = 24, num_colours = 6;

// Whether a head of a layer above uses what the layer projects for head i, or its attention map.
bool is_used_above(const WiringTable& t, int layer, int head) {
  for (int l = layer + 1; l < t.num_layers; l++) {
    if (t.map_layer[l] == layer) return true;
    const std::vector<int>& sources = t.sources(l, head);
    if (std::find(sources.begin(), sources.end(), layer) != sources.end()) return true;
  }
  return false;
}

Head head_of(const WiringTable& t, int l, int i) {
  const int map = t.map_layer[l];
  const bool is_masked = !t.mask(map, i).is_causal();
  if (map != l) return {Kind::map, std::to_string(map), map, is_masked};
  const std::vector<int>& sources = t.sources(l, i);
  std::string text;
  for (int layer : sources) text += (text.empty() ? "" : "+") + std::to_string(layer);
  const Kind kind = sources.size() > 1       ? Kind::several
                    : sources[0] != l        ? Kind::below
                    : is_used_above(t, l, i) ? Kind::source
                                             : Kind::own;
  return {kind, text, sources[0], is_masked};
}

// The rectangle of a kind; its own projection is filled, what comes from elsewhere hatched.
std::string box(const Head& h, double x, double y, double size, const std::string& id) {
  const std::string colour = format("var(--source-%d)", h.layer % num_colours);
  std::string style = "fill:var(--cell);stroke:var(--quiet)";
  if (h.kind == Kind::source)
    style = format("fill:%s;fill-opacity:.35;stroke:%s;stroke-width:2", colour.c_str(), colour.c_str());
  if (h.kind == Kind::below)
    style = format("fill:url(#%s-%d);stroke:%s", id.c_str(), h.layer % num_colours, colour.c_str());
  if (h.kind == Kind::several)
    style = format("fill:url(#%s-%d);stroke:%s;stroke-width:2.5", id.c_str(), h.layer % num_colours, colour.c_str());
  if (h.kind == Kind::map) style = format("fill:none;stroke:%s;stroke-width:2;stroke-dasharray:4 2", colour.c_str());
  std::string svg = format("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" rx=\"3\" style=\"%s\"/>", x, y, size,
                           size, style.c_str());
  if (h.is_masked) svg += format("<path d=\"M%g %gh5l-5 5z\" style=\"fill:var(--ink)\"/>", x + 1.5, y + 1.5);
  return svg;
}

std::string label(double x, double y, const char* anchor, const std::string& text, const char* colour = "--quiet",
                  double size = 12) {
  return format("<text x=\"%g\" y=\"%g\" text-anchor=\"%s\" style=\"font-size:%gpx;fill:var(%s)\">", x, y, anchor, size,
                colour) +
         text + "</text>\n";
}

// Diagonal lines of each colour.
std::string patterns(const std::string& id) {
  std::string svg = "<defs>";
  for (int i = 0; i < num_colours; i++)
    svg += format("<pattern id=\"%s-%d\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" "
                  "patternTransform=\"rotate(45)\">"
                  "<rect width=\"6\" height=\"6\" style=\"fill:var(--source-%d);fill-opacity:.12\"/>"
                  "<rect width=\"2\" height=\"6\" style=\"fill:var(--source-%d);fill-opacity:.45\"/></pattern>",
                  id.c_str(), i, i, i);
  return svg + "</defs>\n";
}

const char* words_of(Kind kind) {
  switch (kind) {
    case Kind::own: return "attends to the K/V that its own layer projects";
    case Kind::source: return "likewise, and layers above use it too";
    case Kind::below: return "attends to the K/V of the layer named, and projects none";
    case Kind::several: return "attends to the K/V of all layers named, in one softmax";
    case Kind::map: return "own v, by the attention map of the layer named";
  }
  return "";
}

// The notes below the picture: what holds for all heads, and the layers' masks.
std::vector<std::string> notes(const WiringTable& t) {
  std::vector<std::string> lines;
  if (t.num_kv_heads < t.num_heads)
    lines.push_back(format("%d K/V heads a layer: query heads between two bars share one", t.num_kv_heads));
  if (t.mix == WiringTable::Mix::blend)
    lines.push_back(format("each attention map is mixed with %g of the one below", t.blend));
  if (t.mix == WiringTable::Mix::gate)
    lines.push_back("each attention map is mixed with the one below, in a share that is learned");
  if (t.topk > 0) lines.push_back(format("of the keys that a query sees, the %d with the highest scores", t.topk));
  if (t.documents) lines.push_back("a query sees only keys of its own document");
  if (t.rope > 0) lines.push_back(format("q and k are rotated by their position, base %g", t.rope));
  if (t.relative) lines.push_back("positions are relative: scores depend on the distance of query and key");
  if (t.stored_layers < t.num_layers)
    lines.push_back(format("layer l has the parameters of layer l mod %d", t.stored_layers));
  if (t.rmsnorm) lines.push_back("norms take no mean and have no bias (RMSNorm)");
  if (t.gru) lines.push_back("branches join the residual stream in gates (GRU)");
  if (t.halting > 0)
    lines.push_back(format("a token halts after the cycle in which its halting probabilities reach 1 - %g", t.halting));
  if (t.memory > 0) lines.push_back(format("memory: a segment also attends to the %d positions before it", t.memory));
  std::vector<std::string> masks;
  for (int l = 0; l < t.num_layers; l++)
    for (int i = 0; i < t.num_heads; i++) {
      const std::string mask = t.mask(t.map_layer[l], i).text();
      if (mask != "all" && std::find(masks.begin(), masks.end(), mask) == masks.end()) masks.push_back(mask);
    }
  for (const std::string& mask : masks) lines.push_back("keys: " + mask);
  return lines;
}

}  // namespace

std::string wiring_picture(const Wiring& wiring, int num_layers, int num_heads, const std::string& id) {
  const WiringTable t = wiring_table(wiring, num_layers, num_heads);
  std::map<Kind, Head> kinds;  // a head of each kind that occurs
  bool any_masked = false;
  std::string svg = patterns(id) + label(left, 14, "start", format("heads 0 to %d", num_heads - 1));
  for (int l = num_layers - 1; l >= 0; l--) {
    const int y = top + (num_layers - 1 - l) * step;
    svg += label(left - 8, y + 16, "end", format("layer %d", l));
    for (int i = 0; i < num_heads; i++) {
      const Head head = head_of(t, l, i);
      const int x = left + i * step;
      svg += box(head, x, y, cell, id) +
             label(x + cell / 2.0, y + 15, "middle", head.text, "--ink", head.text.size() > 2 ? 8 : 11);
      if (i > 0 && t.kv_head(i) != t.kv_head(i - 1) && t.num_kv_heads < num_heads)
        svg += format("<path d=\"M%g %dv%d\" style=\"stroke:var(--ink);stroke-width:1.5\"/>", x - 1.5, y - 1, cell + 2);
      kinds.emplace(head.kind, head);
      any_masked |= head.is_masked;
    }
  }
  int y = top + num_layers * step + 12;
  auto add_row = [&](const std::string& picture, const std::string& words) {
    svg += picture + label(30, y + 11, "start", words);
    y += 20;
  };
  for (auto& [kind, head] : kinds) {
    head.is_masked = false;
    add_row(box(head, 8, y, 14, id), words_of(kind));
  }
  if (any_masked) add_row(box({Kind::own, "", 0, true}, 8, y, 14, id), "does not see all earlier positions");
  for (const std::string& line : notes(t)) add_row("", line);
  const int width = std::max(left + num_heads * step + 4, 420);
  return format("<svg class=\"wiring\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n<title>whose "
                "K/V each head attends to</title>\n",
                width, y, width, y) +
         svg + "</svg>\n";
}
