// A trained model continued with another wiring than it was trained with: GPT-2 as a model with skip-layer attention,
// say. Most of its weights stay as they are. In a layer's c_attn
//   - the rows of a head of q, k or v that the new wiring uses too stay, whichever layers attend to it now;
//   - rows that no attention uses any more are left out, as in every model with that wiring;
//   - a K/V head takes the mean of what its query heads had, as in grouped-query attention (Ainslie et al. 2023,
//     section 2.1), and where there are more K/V heads than before a copy;
//   - rows that were left out have no trained values: they start as in a new model.
// Where layers repeat, before or now (`universal`), each layer takes the weights of the one that has run in its place.
// Gates of maps and of the residual stream, halting, rotations, and positions that the model did not have start as in a
// new model, too. An output head that is `untied` now begins as the embeddings, with which it shared its weight.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>
#include "attention_plan.h"
#include "llmc/wiring/config.h"
#include "llmc/formats/checkpoint.h"
#include "llmc/base/error.h"
#include "llmc/base/text.h"
#include "parameters.h"

struct WiringChange {
  ModelConfig model;     // the model as it was trained
  AttentionPlan plan;    // the plan of that model's attention
  ParameterTable table;  // the parameters of that model, without rows of unused heads
  AttentionPlan new_plan;
  ParameterTable new_table;
};

inline WiringChange plan_wiring_change(const ModelConfig& model, const AttentionPlan& new_plan) {
  const AttentionPlan plan = make_attention_plan(model);
  CHECK(plan.num_layers == new_plan.num_layers && plan.num_heads == new_plan.num_heads);
  return {model, plan, make_parameter_table(model, plan), new_plan, make_parameter_table(model, new_plan)};
}

// The trained heads whose mean a head of the new model is, one for each of its query heads that had one: heads of the
// same layer, and of q, k or v as this one. Empty: its rows have no trained values.
inline std::vector<int> trained_heads(const WiringChange& c, Qkv which, int layer, int head) {
  std::vector<int> heads;
  const bool is_q = which == Qkv::q;
  const WiringTable& now = c.new_plan.table;
  int i = is_q ? head : int(int64_t(head) * now.num_heads / now.num_kv_heads);
  while (!is_q && now.kv_head(i) < head) i++;
  for (; i < now.num_heads && (is_q ? i : now.kv_head(i)) == head; i++) {
    const int before = is_q ? i : c.plan.table.kv_head(i);
    if (c.plan.projected_index(which, {layer, before}) >= 0) heads.push_back(before);
  }
  return heads;
}

// Sets the rows of a layer's c_attn that have trained values; the others stay. `trained` and `values`: the layer's
// weight or bias in the arena of the trained and of the new model; `head_elements`: how many elements of it a head
// takes, hs * C in the weight and hs in the bias.
inline void take_trained_rows(const WiringChange& c, int layer, int64_t head_elements, const float* trained,
                              float* values) {
  for (Qkv which : all_qkv) {
    for (int head : c.new_plan.projected[which][layer]) {
      std::vector<const float*> sources;
      for (int source : trained_heads(c, which, layer, head))
        sources.push_back(trained + c.plan.projected_index(which, {layer, source}) * head_elements);
      float* rows = values + c.new_plan.projected_index(which, {layer, head}) * head_elements;
      for (int64_t i = 0; i < head_elements && !sources.empty(); i++) {
        double sum = sources[0][i];  // in double the mean of equal values is that value
        for (size_t n = 1; n < sources.size(); n++) sum += sources[n][i];
        rows[i] = float(sum / double(sources.size()));
      }
    }
  }
}

// A parameter by its name and its shape in files, by which both models know it. The shape of a c_attn, whose rows are
// of heads, is left out. `layer`: stands in the name for the layer's number.
inline std::string parameter_key(const ParameterTable& table, int index, const std::string& layer) {
  const ParameterSpec& spec = table.specs[index];
  const std::string& name = table.tensor(index).name;
  return (spec.layer < 0 ? name : "h." + layer + name.substr(name.find('.', 2))) +
         (spec.full_rows.empty() ? " " + shape_text(spec.file_shape) : "");
}

// Whether the output head was tied to the embeddings and is no longer: its weight begins as theirs.
inline bool unties_head(const WiringChange& c) { return c.new_plan.table.untied && !c.plan.table.untied; }
constexpr const char *embeddings_name = "wte.weight", *head_name = "lm_head.weight";

// The trained model's key for a parameter of the new one. A layer's come from the layer whose parameters it used.
inline std::string trained_key(const WiringChange& c, const ParameterTable& table, int index) {
  if (unties_head(c) && table.tensor(index).name == head_name)
    return embeddings_name + (" " + shape_text(table.specs[index].file_shape));
  const int layer = std::max(table.specs[index].layer, 0), before = c.plan.table.stored_layers;
  return parameter_key(table, index, std::to_string(layer % before));
}

// Reads the trained model in `folder` for the parameters `table` of the new one and hands each of them to `store`.
// `initial(index)`: what that parameter is in a new model. Throws UserError as read_weight_files does.
inline void read_weights_for_new_wiring(const std::string& folder, const WiringChange& c, const ParameterTable& table,
                                        const std::function<std::vector<float>(int)>& initial,
                                        const StoreTensor& store) {
  std::multimap<std::string, int> without_values;  // parameters of the new model
  for (int i = 0; i < table.size(); i++) without_values.emplace(trained_key(c, table, i), i);
  const bool keeps_constants = c.plan.table.lsh_buckets == c.new_plan.table.lsh_buckets &&
                               c.plan.table.lsh_rounds == c.new_plan.table.lsh_rounds;
  for (int i = table.size(); i < table.file_tensors() && !keeps_constants; i++) store(i, initial(i).data());
  read_weights(folder, c.table, [&](int from, const float* trained) {
    if (c.table.is_constant(from)) {
      if (keeps_constants) store(from - c.table.size() + table.size(), trained);
      return;
    }
    const ParameterSpec& spec = c.table.specs[from];
    const auto [begin, end] = without_values.equal_range(trained_key(c, c.table, from));
    for (auto it = begin; it != end; ++it) {  // none of a gate that the new wiring has not
      const int index = it->second;
      const bool is_of_heads = !spec.full_rows.empty();
      if (is_of_heads) {
        std::vector<float> values = initial(index);
        const int64_t row_elements = c.table.tensor(from).num_elements() / int64_t(spec.full_rows.size());
        take_trained_rows(c, table.specs[index].layer, c.model.head_size() * row_elements, trained, values.data());
        store(index, values.data());
      } else {
        store(index, trained);
      }
    }
    without_values.erase(begin, end);
  });
  for (const auto& [key, index] : without_values) store(index, initial(index).data());
}

// How many heads of a layer ...
struct LayerChange {
  int moved = 0;            // query heads that attend to K/V of other layers
  int remapped = 0;         // query heads that have another mask, or another layer's attention map
  int averaged = 0;         // heads of k and v that are means of several heads
  int least = 0, most = 0;  // the smallest and the largest number of heads in such a mean
  int repeated = 0;         // heads of k and v that are copies of one that another head is a copy of, too
  // Heads of q, k and v that the layer projected and that no attention uses now; and those without trained values.
  int unused = 0, fresh = 0;
};

inline LayerChange layer_change(const WiringChange& c, int l) {
  LayerChange change;
  const WiringTable &before = c.plan.table, &now = c.new_plan.table;
  for (int i = 0; i < c.plan.num_heads; i++) {
    change.moved += before.sources(l, i) != now.sources(l, i);
    const int map_before = before.map_layer[l], map_now = now.map_layer[l];
    change.remapped += map_before != map_now || before.mask(map_before, i).text() != now.mask(map_now, i).text();
  }
  for (Qkv which : all_qkv) {
    std::set<int> used, copied;
    for (int head : c.new_plan.projected[which][l]) {
      const std::vector<int> all = trained_heads(c, which, l, head);
      const std::set<int> distinct(all.begin(), all.end());
      const int n = int(distinct.size());
      change.fresh += n == 0;
      change.repeated += n == 1 && !copied.insert(*distinct.begin()).second;
      if (n > 1) {
        change.least = change.averaged++ > 0 ? std::min(change.least, n) : n;
        change.most = std::max(change.most, n);
      }
      used.insert(distinct.begin(), distinct.end());
    }
    change.unused += int(c.plan.projected[which][l].size() - used.size());
  }
  return change;
}

// Describes what changes in layer l; "" if nothing does.
inline std::string layer_change_text(const WiringChange& c, int l) {
  const LayerChange change = layer_change(c, l);
  std::vector<std::string> parts;
  const int hs = c.model.head_size();
  if (change.moved > 0) parts.push_back(format("%d heads attend to K/V of other layers than before", change.moved));
  if (change.remapped > 0) parts.push_back(format("%d heads have another mask or attention map", change.remapped));
  if (change.averaged > 0) {
    const std::string of =
        change.least == change.most ? format("%d", change.most) : format("%d to %d", change.least, change.most);
    parts.push_back(format("%d heads of k and v are means of %s each", change.averaged, of.c_str()));
  }
  if (change.repeated > 0) parts.push_back(format("%d heads of k and v are copies of others", change.repeated));
  if (change.unused > 0) parts.push_back(format("%d rows of c_attn are not used any more", change.unused * hs));
  if (change.fresh > 0)
    parts.push_back(format("%d rows of c_attn have no trained values and start as in a new model", change.fresh * hs));
  return joined(parts, "; ");
}

// "layers 1, 3 to 5".
inline std::string layers_text(const std::vector<int>& layers) {
  std::string text = layers.size() == 1 ? "layer " : "layers ";
  for (size_t i = 0, last; i < layers.size(); i = last + 1) {
    for (last = i; last + 1 < layers.size() && layers[last + 1] == layers[last] + 1;) last++;
    text += format(last > i ? "%s%d to %d" : "%s%d", i > 0 ? ", " : "", layers[i], layers[last]);
  }
  return text;
}

// The parameters and constants of a model, with one key for the same tensor of all layers: "h.*.ln_1.weight (768)".
inline std::vector<std::string> tensor_keys(const ParameterTable& table) {
  std::set<std::string> keys;
  for (int i = 0; i < table.size(); i++) keys.insert(parameter_key(table, i, "*"));
  for (const ConstantTensor& constant : table.constants)
    keys.insert("h.*" + constant.name.substr(constant.name.find('.', 2)) + " " + shape_text(constant.shape));
  return {keys.begin(), keys.end()};
}

// Of those of the new model, those that the trained one has not, but for an output head that begins as the embeddings.
inline std::vector<std::string> new_tensor_keys(const WiringChange& c) {
  const std::vector<std::string> before = tensor_keys(c.table);
  std::vector<std::string> keys;
  for (const std::string& key : tensor_keys(c.new_table))
    if (std::find(before.begin(), before.end(), key) == before.end() &&
        !(unties_head(c) && begins_with(key, head_name)))
      keys.push_back(key);
  return keys;
}

// A line for each text of `a` that is not in `b`.
inline std::string lines_of_missing(const char* intro, const std::vector<std::string>& a,
                                    const std::vector<std::string>& b) {
  std::string lines;
  for (const std::string& text : a)
    if (std::find(b.begin(), b.end(), text) == b.end()) lines += format("  %s: %s\n", intro, text.c_str());
  return lines;
}

// Describes what changes: what terms note of the model, its tensors, and a line for all layers in which the same
// changes.
inline std::string describe(const WiringChange& c) {
  std::vector<std::pair<std::string, std::vector<int>>> lines;  // what changes, and in which layers
  for (int l = 0; l < c.plan.num_layers; l++) {
    const std::string change = layer_change_text(c, l);
    if (change.empty()) continue;
    auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& known) { return known.first == change; });
    if (line == lines.end()) line = lines.insert(line, {change, {}});
    line->second.push_back(l);
  }
  const std::vector<std::string>&notes_before = c.plan.table.notes, &notes_now = c.new_plan.table.notes;
  std::string text = lines_of_missing("no longer", notes_before, notes_now) +
                     lines_of_missing("from now on", notes_now, notes_before) +
                     lines_of_missing("dropped", tensor_keys(c.table), tensor_keys(c.new_table)) +
                     lines_of_missing("as in a new model", new_tensor_keys(c), {});
  for (const std::string& key : tensor_keys(c.new_table))
    if (unties_head(c) && begins_with(key, head_name)) text += format("  as %s: %s\n", embeddings_name, key.c_str());
  for (const auto& [change, layers] : lines) text += "  " + layers_text(layers) + ": " + change + "\n";
  return text.empty() ? "  nothing\n" : text;
}

// What the new wiring needs and the trained model has not, or "".
inline std::string weights_without_values(const WiringChange& c) {
  for (const std::string& key : new_tensor_keys(c)) return key;
  for (int l = 0; l < c.plan.num_layers; l++)
    if (const int fresh = layer_change(c, l).fresh; fresh > 0)
      return format("%d rows of layer %d's c_attn", fresh * c.model.head_size(), l);
  return "";
}
