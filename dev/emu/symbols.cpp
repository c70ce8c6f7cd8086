// The names of functions, static ones too, from the symbol table of the program's file.
#include <dlfcn.h>
#include <elf.h>
#include <algorithm>
#include <cstring>
#include <fstream>
#include <unordered_map>
#include "emu.h"

namespace emu {
namespace {

using Names = std::unordered_map<uint64_t, std::string>;  // by the address in the file

Names read_names(const std::string& file) {
  Names names;
  std::ifstream stream(file, std::ios::binary | std::ios::ate);
  std::string bytes(size_t(std::max<std::streamoff>(0, stream.tellg())), '\0');
  stream.seekg(0).read(bytes.data(), std::streamsize(bytes.size()));
  if (bytes.size() < sizeof(Elf64_Ehdr) || memcmp(bytes.data(), ELFMAG, SELFMAG) != 0) return names;
  const auto* const header = reinterpret_cast<const Elf64_Ehdr*>(bytes.data());
  const auto* const sections = reinterpret_cast<const Elf64_Shdr*>(bytes.data() + header->e_shoff);
  for (int s = 0; s < header->e_shnum; s++) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* const symbols = reinterpret_cast<const Elf64_Sym*>(bytes.data() + sections[s].sh_offset);
    const char* const text = bytes.data() + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof(Elf64_Sym); i++)
      if (ELF64_ST_TYPE(symbols[i].st_info) == STT_FUNC) names.emplace(symbols[i].st_value, text + symbols[i].st_name);
  }
  return names;
}

}  // namespace

std::string symbol_at(const void* function) {
  Dl_info info;
  if (dladdr(function, &info) == 0) return "";
  if (info.dli_sname != nullptr && info.dli_saddr == function) return info.dli_sname;
  static const Names& names = *new Names(read_names("/proc/self/exe"));
  const auto it = names.find(reinterpret_cast<uint64_t>(function) - reinterpret_cast<uint64_t>(info.dli_fbase));
  return it != names.end() ? it->second : "";
}

}  // namespace emu
