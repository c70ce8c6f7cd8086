#include "hmac.h"
#include <dlfcn.h>
#include "llmc/utils/error.h"

namespace {

// <openssl/hmac.h> and <openssl/evp.h>, the same in all versions since 1.1.
struct Libcrypto {
  using Hash = const void* (*)();
  using Hmac = unsigned char* (*)(const void* hash, const void* key, int key_size, const unsigned char* text,
                                  size_t text_size, unsigned char* mac, unsigned* mac_size);
  Hash sha256 = nullptr;
  Hmac hmac = nullptr;

  Libcrypto() {
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
      void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library == nullptr) continue;
      sha256 = reinterpret_cast<Hash>(dlsym(library, "EVP_sha256"));
      hmac = reinterpret_cast<Hmac>(dlsym(library, "HMAC"));
      if (sha256 != nullptr && hmac != nullptr) return;
    }
    user_error("several ranks need OpenSSL's libcrypto, by which they know each other, and it is not found; install "
               "libssl3, or openssl");
  }
};

}  // namespace

std::string hmac_sha256(const std::string& key, const std::string& text) {
  static const Libcrypto library;
  std::string mac(32, '\0');
  unsigned size = 0;
  const void* const done =
      library.hmac(library.sha256(), key.data(), int(key.size()), reinterpret_cast<const unsigned char*>(text.data()),
                   text.size(), reinterpret_cast<unsigned char*>(mac.data()), &size);
  if (done == nullptr || size != mac.size()) user_error("OpenSSL's libcrypto computes no HMAC-SHA-256 here");
  return mac;
}
