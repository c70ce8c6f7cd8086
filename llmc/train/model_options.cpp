#include "model_options.h"
#include "llmc/formats/config_json.h"
#include "llmc/base/error.h"
#include "llmc/base/files.h"

ModelConfig model_config(const ModelOptions& o, std::optional<ModelConfig>& in_folder) {
  ModelConfig c;
  in_folder.reset();
  if (config_from_preset(o.model, c)) {
    for (const ShapeOption& shape : shape_options) c.*shape.field = (o.*shape.value).value_or(c.*shape.field);
    c.bias = !o.no_bias;
    c.wiring = default_wiring(c.num_layers, c.num_heads);
  } else {
    if (!is_folder(o.model))
      user_error("-e %s: neither a preset (d12, d24, d36, d48, gpt3:CHANNELS) nor a folder; data/convert makes a "
                 "folder of a model of llm.c",
                 o.model);
    in_folder = c = read_config_json(o.model);
    for (const ShapeOption& shape : shape_options)
      if (o.*shape.value) user_error("-e %s: a folder's model has its shape; leave out %s", o.model, shape.flag);
    if (o.no_bias && c.bias) user_error("-e %s: a folder's model has its shape; leave out --no-bias", o.model);
  }
  if (o.wiring) c.wiring = parse_wiring(*o.wiring);
  validate(c);
  return c;
}

// The options that decide on a field of config.json.
static std::string options_of(const std::string& json_key) {
  if (json_key == "wiring") return "-e, --wiring";
  if (json_key == "bias") return "-e, --no-bias";
  std::string options = "-e";
  ModelConfig c;
  visit_fields(c, [&](const ConfigField& field, auto& value) {
    for (const ShapeOption& shape : shape_options)
      if (field.json == json_key && static_cast<void*>(&value) == &(c.*shape.field))
        options += std::string(", ") + shape.flag;
  });
  return options;
}

void check_resumed_model(const std::string& checkpoint, const ModelConfig& config) {
  std::string all;
  for (const FieldDifference& d : differences(read_config_json(checkpoint), config))
    all += format("%sits %s is %s, the options' is %s (%s)", all.empty() ? "" : "; ", d.json, d.first.c_str(),
                  d.second.c_str(), options_of(d.json).c_str());
  if (!all.empty())
    user_error("-y: %s is of another model than the options describe: %s; give the same, or start anew in another "
               "folder",
               checkpoint, all);
}
