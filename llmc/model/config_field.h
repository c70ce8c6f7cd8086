// What there is to say of a field of a model's description, beside its value.
#pragma once

struct ConfigField {
  const char* json;  // its key in config.json: Hugging Face's, where GPT-2 there has the field
  const char* name;  // its key in log.jsonl
  bool required;     // config.json must have it
};
