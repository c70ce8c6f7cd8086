// What the control groups of this process allow, as containers and batch systems limit a job: the group itself and
// those above it, of cgroup v2 and of v1.
#pragma once
#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

// Where the kernel says which groups those are, and where their folders are.
constexpr char cgroups_of_process[] = "/proc/self/cgroup", cgroup_mount[] = "/sys/fs/cgroup";

// The folders that limit `controller` ("cpu", "memory"), the process's group first. A line of /proc/self/cgroup is
// "number:controllers:/path", and "0::/path" of v2. In a container the path may be the host's: only the folders above
// it exist then, and the last of them is the container's own.
inline std::vector<std::string> cgroup_folders(const std::string& controller, const std::string& membership,
                                               const std::string& root) {
  std::vector<std::string> folders;
  std::ifstream groups(membership);
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::vector<std::string> mounts = {root + "/" + controllers, root + "/" + controller};
    if (controllers.empty()) mounts = {root, root + "/unified"};
    else if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    for (const std::string& mount : mounts)
      for (std::string group = line.substr(second + 1);; group.resize(group.rfind('/'))) {
        folders.push_back(mount + group);
        if (group.find('/') == std::string::npos) break;
      }
  }
  return folders;
}

// A number that a file of a control group begins with, or has after the word `field`; `otherwise` where there is none,
// as of "max", which is no limit.
inline double cgroup_number(const std::string& path, double otherwise, const char* field = nullptr) {
  std::ifstream file(path);
  double value;
  if (field == nullptr) return file >> value ? value : otherwise;
  for (std::string name; file >> name >> value;)
    if (name == field) return value;
  return otherwise;
}

// How many processors' time is allowed; infinite if no group limits it.
inline double processors_allowed(const std::string& membership = cgroups_of_process,
                                 const std::string& root = cgroup_mount) {
  double least = std::numeric_limits<double>::infinity();
  for (const std::string& folder : cgroup_folders("cpu", membership, root)) {
    std::ifstream limit(folder + "/cpu.max");
    double quota, period;  // of microseconds; "max" for none is no number
    if (!(limit >> quota >> period)) {
      quota = cgroup_number(folder + "/cpu.cfs_quota_us", -1);  // v1; -1: none
      period = cgroup_number(folder + "/cpu.cfs_period_us", 0);
    }
    if (quota > 0 && period > 0) least = std::min(least, quota / period);
  }
  return least;
}

// The bytes of memory that the groups leave free; infinite if no group limits them. Files in the page cache do not
// count as used, because the kernel drops them when memory is needed.
inline double cgroup_memory_free(const std::string& membership = cgroups_of_process,
                                 const std::string& root = cgroup_mount) {
  struct Names {
    const char *limit, *usage, *stat;
  };
  const Names v2 = {"/memory.max", "/memory.current", ""}, v2_soft = {"/memory.high", "/memory.current", ""},
              v1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"};
  constexpr double none = std::numeric_limits<double>::infinity();
  double least = none;
  for (const std::string& folder : cgroup_folders("memory", membership, root))
    for (const Names& names : {v2, v2_soft, v1}) {
      auto cached = [&](const char* which) {
        return cgroup_number(folder + "/memory.stat", 0, (std::string(names.stat) + which).c_str());
      };
      const double limit = cgroup_number(folder + names.limit, none), used = cgroup_number(folder + names.usage, 0);
      const double in_use = std::max(0.0, used - cached("inactive_file") - cached("active_file"));
      least = std::min(least, std::max(0.0, limit - in_use));
    }
  return least;
}
