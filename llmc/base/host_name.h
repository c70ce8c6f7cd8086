#pragma once
#include <unistd.h>
#include <string>

// This machine's name as messages show it; "" where the system has none.
inline std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}
