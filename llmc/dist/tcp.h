// TCP as rank_channel.cpp uses it: non-blocking connections with buffers, listening, and this machine's addresses.
#pragma once
#include <sys/socket.h>
#include <cstddef>
#include <string>
#include <vector>
#include "llmc/utils/clock.h"
#include "llmc/utils/files.h"

// A non-blocking socket with the bytes that were received and not yet processed, and those that are to be sent.
struct Connection : FileDescriptor {
  std::string in, out;
  double since = seconds_now();  // when it was opened

  Connection() = default;
  explicit Connection(int descriptor);

  void close_now();
  // Appends received bytes, at most `limit`, to `in`. Returns false if the other end has closed the connection or it
  // has failed; what was received before that is in `in`.
  bool read_some(size_t limit = size_t(1) << 20);
  // Sends as much of `out` as fits into the system's buffer. A lost connection is reported by read_some.
  void write_some();
};

struct Address {
  sockaddr_storage bytes;
  socklen_t size;
};

// The addresses of a host, given by name or number. If there are none, `error` is getaddrinfo's error, otherwise 0.
std::vector<Address> addresses_of(const std::string& host, const std::string& port, int& error);

// Connects; fd is -1 if that fails or takes longer than `seconds`.
Connection connect_to(const Address& address, double seconds);

// Whether it is an address of this machine, with port 0.
bool is_own(const Address& address);
// The other end's address, as a number; "" if it is gone.
std::string address_of_peer(const Connection& connection);

// A socket that listens at `port` (0: any free one), at loopback_address alone or at all addresses of this machine; -1,
// with errno, on failure.
constexpr char loopback_address[] = "127.0.0.1";
int listen_at(int port, bool loopback_only);
// The port of a listening socket.
int port_of(int listener);

// This machine's addresses as numbers, and its name, best first. Loopback is last: it is of use only to a run on a
// single machine.
std::vector<std::string> own_addresses();
