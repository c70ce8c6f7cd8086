#include "option.h"
#include <algorithm>
#include <cmath>
#include "llmc/base/error.h"
#include "llmc/base/text.h"

// NaN for what is no number.
static double number_in(const Scalar& value) {
  if (const int64_t* whole = std::get_if<int64_t>(&value)) return double(*whole);
  const double* number = std::get_if<double>(&value);
  return number != nullptr ? *number : NAN;
}

Range at_least(double least) {
  return {"be at least " + shortest(least), [=](const Scalar& value) { return number_in(value) >= least; }};
}

Range above(double low) {
  return {"be greater than " + shortest(low), [=](const Scalar& value) { return float(number_in(value)) > low; }};
}

Range between(double low, double high) {
  return {"lie between " + shortest(low) + " and " + shortest(high),
          [=](const Scalar& value) { return number_in(value) >= low && number_in(value) <= high; }};
}

Range between_excluding_end(double low, double high, double steps) {
  const std::string must = "lie in [" + shortest(low) + ", " + shortest(high) + "), rounded to ";
  return {must + (steps > 0 ? "a multiple of 1/" + shortest(steps) : "a float"), [=](const Scalar& value) {
            const double x = number_in(value), rounded = steps > 0 ? std::floor(x * steps + 0.5) / steps : float(x);
            return x >= low && rounded < high;
          }};
}

Range zero_or_at_least(double least, const char* unit) {
  return {"be 0, or at least " + shortest(least) + " " + unit,
          [=](const Scalar& value) { return number_in(value) == 0 || number_in(value) >= least; }};
}

std::string either(const std::vector<std::string>& names) { return joined(names, ", ", " or "); }

Range one_of(const std::vector<std::string>& names) {
  return {"be " + either(names), [=](const Scalar& value) {
            return std::find(names.begin(), names.end(), std::get<std::string>(value)) != names.end();
          }};
}

bool parse_flag(const std::string& text) {
  if (text == "true" || text == "1" || text.empty()) return true;
  if (text == "false" || text == "0") return false;
  user_error("%s: is neither 1 (true) nor 0 (false)", text);
}

const Option& OptionTable::operator[](const std::string& flag) const {
  auto it = std::find_if(begin(), end(), [&](const Option& option) { return option.flag() == flag; });
  CHECK(it != end());
  return *it;
}
