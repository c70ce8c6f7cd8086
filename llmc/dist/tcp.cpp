#include "tcp.h"
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include "llmc/utils/error.h"
#include "llmc/utils/host_name.h"

Connection::Connection(int descriptor) : FileDescriptor(descriptor) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

void Connection::close_now() {
  if (fd >= 0) close(std::exchange(fd, -1));
  out.clear();
}

bool Connection::read_some(size_t limit) {
  char bytes[1 << 16];
  while (limit > 0) {
    const ssize_t n = recv(fd, bytes, std::min(limit, sizeof bytes), MSG_DONTWAIT);
    if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
    in.append(bytes, n);
    limit -= size_t(n);
  }
  return true;
}

void Connection::write_some() {
  while (!out.empty()) {
    const ssize_t n = ::send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n <= 0) return;
    out.erase(0, n);
  }
}

std::vector<Address> addresses_of(const std::string& host, const std::string& port, int& error) {
  addrinfo hints = {}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  std::vector<Address> all;
  for (const addrinfo* a = error == 0 ? found : nullptr; a != nullptr; a = a->ai_next) {
    all.push_back({{}, a->ai_addrlen});
    memcpy(&all.back().bytes, a->ai_addr, a->ai_addrlen);
  }
  if (error == 0) freeaddrinfo(found);
  return all;
}

Connection connect_to(const Address& address, double seconds) {
  Connection c(socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (c.fd < 0) return c;
  int error = connect(c.fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd writable = {c.fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    if (poll(&writable, 1, int(seconds * 1e3)) == 1) getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) c.close_now();
  return c;
}

// The address as a number; "" if it has none.
static std::string number_of(const sockaddr* address, socklen_t size) {
  char text[NI_MAXHOST];
  return getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0 ? text : "";
}

bool is_own(const Address& address) {  // a socket can only be bound to those
  const Connection c(socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return bind(c.fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0;
}

std::string address_of_peer(const Connection& connection) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof peer;
  if (getpeername(connection.fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "";
  return number_of(reinterpret_cast<const sockaddr*>(&peer), size);
}

int listen_at(int port, bool loopback_only) {
  std::vector<std::string> hosts = {"::", "0.0.0.0"};  // an IPv6 socket accepts IPv4 connections, too
  if (loopback_only) hosts = {loopback_address};
  int error;  // numbers have none
  for (const std::string& host : hosts)
    for (const Address& address : addresses_of(host, std::to_string(port), error)) {
      const int family = address.bytes.ss_family, yes = 1, no = 0;
      FileDescriptor s(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      if (s.fd < 0) continue;
      setsockopt(s.fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      if (family == AF_INET6) setsockopt(s.fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
      const bool is_bound = bind(s.fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0;
      if (is_bound && listen(s.fd, SOMAXCONN) == 0) return std::exchange(s.fd, -1);
    }
  return -1;
}

int port_of(int listener) {
  sockaddr_storage bound = {};
  socklen_t size = sizeof bound;
  CHECK(getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &size) == 0);
  return ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                           : reinterpret_cast<sockaddr_in&>(bound).sin_port);
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses, loopback;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {host_name()};
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(i->ifa_addr)->sin6_addr))
      continue;  // other machines would have to add the name of their own interface to it
    const std::string number = number_of(i->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (number.empty()) continue;
    ((i->ifa_flags & IFF_LOOPBACK) != 0 ? loopback : addresses).push_back(number);
  }
  freeifaddrs(all);
  addresses.push_back(host_name());
  addresses.insert(addresses.end(), loopback.begin(), loopback.end());
  return addresses;
}
