// HMAC-SHA-256 (RFC 2104), by which ranks prove to each other that they know a secret (rank_channel.h).
#pragma once
#include <string>

// The 32 bytes of HMAC-SHA-256 of the text under the key. OpenSSL's libcrypto computes it. It is loaded by the first
// call and not linked: a single process, as of a GPU bundle, runs without it. Throws UserError if there is none.
std::string hmac_sha256(const std::string& key, const std::string& text);
