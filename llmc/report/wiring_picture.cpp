#include "wiring_picture.h"
#include <algorithm>
#include <map>
#include "llmc/model/attention_plan.h"
#include "llmc/base/error.h"

namespace {

enum class Use { own, source, below, several, map };

struct Head {
  Use use;
  std::string text;  // in the cell
  int layer;         // the layer whose K/V, or attention map, it uses: gives the colour
  bool is_masked;
};

constexpr int cell = 22, step = 25, left = 62, top = 24, num_colours = 6;

// Whether a head of a layer above uses the keys (k) or the values (v) that the layer projects for head i, or its
// attention map.
bool is_used_above(const WiringTable& t, int layer, int head, bool k, bool v) {
  for (int l = layer + 1; l < t.num_layers; l++) {
    if (t.map_layer[l] == layer) return true;
    for (const KVSource& source : t.sources(l, head))
      if ((k && source.k == layer) || (v && source.v == layer)) return true;
  }
  return false;
}

// The boxes of a head: one, or one for its keys and one for its values if they are of different layers.
std::vector<Head> boxes_of(const WiringTable& t, int l, int i) {
  const int map = t.map_layer[l];
  const bool is_masked = !t.mask(map, i).is_causal();
  if (map != l) return {{Use::map, std::to_string(map), map, is_masked}};
  const std::vector<KVSource>& sources = t.sources(l, i);
  if (sources.size() > 1) {
    std::string text;
    for (const KVSource& source : sources) text += (text.empty() ? "" : "+") + source_text(source, -1);
    return {{Use::several, text, sources[0].k, is_masked}};
  }
  auto box_of = [&](int layer, bool k, bool v) {
    const Use use = layer != l ? Use::below : is_used_above(t, l, i, k, v) ? Use::source : Use::own;
    return Head{use, std::to_string(layer), layer, is_masked && k};
  };
  const auto [k, v] = sources[0];
  if (k == v) return {box_of(k, true, true)};
  return {box_of(k, true, false), box_of(v, false, true)};
}

// A head's rectangle: its own projection is filled, what comes from elsewhere hatched.
std::string box(const Head& h, double x, double y, double size, double height, const std::string& id) {
  const std::string colour = format("var(--source-%d)", h.layer % num_colours);
  std::string style = "fill:var(--cell);stroke:var(--quiet)";
  if (h.use == Use::source)
    style = format("fill:%s;fill-opacity:.35;stroke:%s;stroke-width:2", colour.c_str(), colour.c_str());
  if (h.use == Use::below)
    style = format("fill:url(#%s-%d);stroke:%s", id.c_str(), h.layer % num_colours, colour.c_str());
  if (h.use == Use::several)
    style = format("fill:url(#%s-%d);stroke:%s;stroke-width:2.5", id.c_str(), h.layer % num_colours, colour.c_str());
  if (h.use == Use::map) style = format("fill:none;stroke:%s;stroke-width:2;stroke-dasharray:4 2", colour.c_str());
  std::string svg = format("<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" rx=\"3\" style=\"%s\"/>", x, y, size,
                           height, style.c_str());
  if (h.is_masked) svg += format("<path d=\"M%g %gh5l-5 5z\" style=\"fill:var(--ink)\"/>", x + 1.5, y + 1.5);
  return svg;
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

const char* words_of(Use use) {
  switch (use) {
    case Use::own: return "attends to the K/V that its own layer projects";
    case Use::source: return "likewise, and layers above use it too";
    case Use::below: return "attends to the K/V of the layer named, and projects none";
    case Use::several: return "attends to the K/V of all layers named, in one softmax";
    case Use::map: return "own v, by the attention map of the layer named";
  }
  return "";
}

// The notes below the picture: what holds for all heads, and the layers' masks.
std::vector<std::string> notes(const WiringTable& t) {
  std::vector<std::string> lines;
  if (t.num_kv_heads < t.num_heads)
    lines.push_back(format("%d K/V heads per layer: query heads between two bars share one", t.num_kv_heads));
  lines.insert(lines.end(), t.notes.begin(), t.notes.end());
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

std::string svg_text(double x, double y, const char* anchor, const std::string& text, const char* colour, double size) {
  return format("<text x=\"%g\" y=\"%g\" text-anchor=\"%s\" style=\"font-size:%gpx;fill:var(%s)\">", x, y, anchor, size,
                colour) +
         text + "</text>\n";
}

std::string wiring_picture(const Wiring& wiring, int num_layers, int num_heads, const std::string& id) {
  const WiringTable t = wiring_table(wiring, num_layers, num_heads);
  std::map<Use, Head> uses;  // a head of each use that occurs
  bool any_masked = false, any_apart = false;
  std::string svg = patterns(id) + svg_text(left, 14, "start", format("heads 0 to %d", num_heads - 1));
  for (int l = num_layers - 1; l >= 0; l--) {
    const int y = top + (num_layers - 1 - l) * step;
    svg += svg_text(left - 8, y + 16, "end", format("layer %d", l));
    for (int i = 0; i < num_heads; i++) {
      const int x = left + i * step;
      const std::vector<Head> boxes = boxes_of(t, l, i);
      const bool is_apart = boxes.size() > 1;
      const double height = is_apart ? cell / 2 - 1 : cell, baseline = is_apart ? 8 : 15;
      for (size_t n = 0; n < boxes.size(); n++) {
        const Head& head = boxes[n];
        const double top_of_box = y + double(n) * (cell - height);
        svg += box(head, x, top_of_box, cell, height, id) + svg_text(x + cell / 2.0, top_of_box + baseline, "middle",
                                                                     head.text, "--ink",
                                                                     is_apart || head.text.size() > 2 ? 8 : 11);
        uses.emplace(head.use, head);
        any_masked |= head.is_masked;
      }
      any_apart |= is_apart;
      if (i > 0 && t.kv_head(i) != t.kv_head(i - 1) && t.num_kv_heads < num_heads)
        svg += format("<path d=\"M%g %dv%d\" style=\"stroke:var(--ink);stroke-width:1.5\"/>", x - 1.5, y - 1, cell + 2);
    }
  }
  int y = top + num_layers * step + 12;
  auto add_row = [&](const std::string& picture, const std::string& words) {
    svg += picture + svg_text(30, y + 11, "start", words);
    y += 20;
  };
  for (auto& [use, head] : uses) {
    head.is_masked = false;
    add_row(box(head, 8, y, 14, 14, id), words_of(use));
  }
  if (any_masked) add_row(box({Use::own, "", 0, true}, 8, y, 14, 14, id), "does not see all earlier positions");
  if (any_apart) add_row("", "two boxes in one: keys above, values below");
  for (const std::string& line : notes(t)) add_row("", line);
  const int width = std::max(left + num_heads * step + 4, 420);
  return format("<svg class=\"wiring\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" role=\"img\">\n<title>whose "
                "K/V each head attends to</title>\n",
                width, y, width, y) +
         svg + "</svg>\n";
}
