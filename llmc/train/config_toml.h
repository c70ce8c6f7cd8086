// Options in a TOML file: `name = value` a line, the names being the command line's long options. TOML is UTF-8, but a
// path, or a text on the command line, is any bytes: where they are not UTF-8 the value is a list of the parts that
// are, and of the other bytes as numbers from 0x80 to 0xFF, such as ["Stra", 0xDF, "e.bin"].
#pragma once
#include <string>
#include <vector>
#include "llmc/base/scalar.h"

struct ConfigEntry {
  std::string name, value;  // the value as the command line would have it
  int line;                 // in the file, from 1
};

// The entries of a file, in its order. Throws UserError, with the line, for a file that cannot be read, text that is
// not TOML (a name given twice, too), sections, and values that are not text, bytes as above, a number, true or false.
std::vector<ConfigEntry> read_config_toml(const std::string& path);

// The line that read_config_toml reads as this entry: any value comes back as it was.
std::string config_toml_line(const std::string& name, const Scalar& value);
