// The wiring of a model as a picture, for a page.
#pragma once
#include <string>
#include "llmc/wiring/wiring.h"

// A text in an <svg>. `anchor` is start, middle or end, `colour` a variable of the page, `size` in pixels.
std::string svg_text(double x, double y, const char* anchor, const std::string& text, const char* colour = "--quiet",
                     double size = 12);

// An <svg>: a row a layer, layer 0 at the bottom, a cell a query head; in the cell the layers whose K/V the head
// attends to, or with `reuse` the layer whose attention map it uses. Uses differ by colour and by pattern, colours by
// source layer; below it is a legend of the uses that occur. Colours are CSS variables of the page, --ink, --quiet,
// --cell and --source-0 to --source-5. The wiring must be valid for so many layers and heads. `id` is a word that the
// page uses once, for its patterns.
std::string wiring_picture(const Wiring& wiring, int num_layers, int num_heads, const std::string& id);
