#include "rank_channel.h"
#include <arpa/inet.h>             // htons
#include <ifaddrs.h>               // getifaddrs
#include <net/if.h>                // IFF_UP, IFF_LOOPBACK
#include <netdb.h>                 // getaddrinfo, getnameinfo
#include <netinet/in.h>            // sockaddr_in6
#include <netinet/tcp.h>           // TCP_NODELAY
#include <poll.h>                  // poll
#include <signal.h>                // pthread_sigmask
#include <sys/eventfd.h>           // eventfd
#include <sys/socket.h>            // socket, bind, connect
#include <unistd.h>                // close, unlink, usleep, write, _exit
#include <algorithm>               // std::min
#include <cerrno>                  // errno
#include <chrono>                  // std::chrono::duration
#include <condition_variable>      // std::condition_variable
#include <cstdlib>                 // atoi
#include <cstring>                 // memcpy, strerror
#include <deque>                   // std::deque
#include <fstream>                 // std::ifstream
#include <mutex>                   // std::mutex
#include <random>                  // std::random_device
#include <sstream>                 // std::istringstream
#include <thread>                  // std::thread
#include <utility>                 // std::exchange
#include <vector>                  // std::vector
#include "llmc/utils/clock.h"      // seconds_now
#include "llmc/utils/files.h"  // try_read_file, write_file_durably, rename_durably
#include "llmc/utils/error.h"      // user_error, CHECK, format
#include "watchdog.h"            // Watchdog, RankReport

namespace {

// ----------------------------------------------------------------------------
// Messages

enum class Kind : uint32_t {
  hello,      // token, rank, size, pid, host of one that wants to be let in
  welcome,    // pid, host of rank 0
  refusal,    // why
  data,       // of send
  heartbeat,  // a RankReport
  error,      // what another rank than 0 ends with
  end,        // rank 0 has said why
  goodbye
};

// Both ends are this program, on machines of a kind.
struct Header {
  uint32_t magic;
  Kind kind;
  Topic topic;
  uint32_t unused;
  uint64_t bytes;  // that follow
};
constexpr uint32_t channel_magic = 0x31414c53;  // "SLA1"

std::string framed(Kind kind, const std::string& bytes, Topic topic = Topic::run) {
  const Header header = {channel_magic, kind, topic, 0, bytes.size()};
  return std::string(reinterpret_cast<const char*>(&header), sizeof header) + bytes;
}

struct Message {
  Kind kind;
  Topic topic;
  std::string bytes;
};

enum class Taken { message, nothing_yet, nonsense };

// Takes the first message of at most `most_bytes` from the front of `in`.
Taken take_message(std::string& in, Message& message, uint64_t most_bytes = uint64_t(1) << 32) {
  Header header;
  if (in.size() < sizeof header) return Taken::nothing_yet;
  memcpy(&header, in.data(), sizeof header);
  if (header.magic != channel_magic || header.topic > Topic::checkpoint || header.bytes > most_bytes) return Taken::nonsense;
  if (in.size() < sizeof header + header.bytes) return Taken::nothing_yet;
  message = {header.kind, header.topic, in.substr(sizeof header, header.bytes)};
  in.erase(0, sizeof header + header.bytes);
  return Taken::message;
}

// ----------------------------------------------------------------------------
// Connections

// A socket, which never waits, with what has come but is not read yet and what is to be sent when there is room.
struct Connection {
  int fd = -1;
  std::string in, out;
  double since = seconds_now();

  Connection() = default;
  explicit Connection(int descriptor) : fd(descriptor) {
    const int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  }
  Connection(Connection&& other) noexcept { *this = std::move(other); }
  Connection& operator=(Connection&& other) noexcept {
    std::swap(fd, other.fd);
    in = std::move(other.in), out = std::move(other.out), since = other.since;
    return *this;
  }
  ~Connection() { close_now(); }

  void close_now() {
    if (fd >= 0) close(std::exchange(fd, -1));
    out.clear();
  }
  // Takes in what is there, up to a megabyte. False if the other end is closed or gone; what it sent before has been taken in.
  bool read_some() {
    char bytes[1 << 16];
    for (int i = 0; i < 16; i++) {
      const ssize_t n = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT);
      if (n <= 0) return n < 0 && (errno == EAGAIN || errno == EINTR);
      in.append(bytes, size_t(n));
    }
    return true;
  }
  // Sends what there is room for. That the other end is gone shows when reading.
  void write_some() {
    while (!out.empty()) {
      const ssize_t n = ::send(fd, out.data(), out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n <= 0) return;
      out.erase(0, size_t(n));
    }
  }
};

// Sends and receives, for as long as `seconds`, until the first message has come.
Taken converse(Connection& c, Message& answer, double seconds) {
  const double end = seconds_now() + seconds;
  for (double left = seconds; left > 0; left = end - seconds_now()) {
    pollfd waiting = {c.fd, short(POLLIN | (c.out.empty() ? 0 : POLLOUT)), 0};
    poll(&waiting, 1, int(left * 1e3) + 1);
    c.write_some();
    const bool is_there = c.read_some();
    const Taken taken = take_message(c.in, answer);
    if (taken != Taken::nothing_yet || !is_there) return taken;
  }
  return Taken::nothing_yet;
}

struct Address {
  sockaddr_storage bytes;
  socklen_t size;
};

// Those of a host's name or number; none if it has none, for the reason in `error`.
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

// fd < 0 if nobody accepts within `seconds`.
Connection connect_to(const Address& address, double seconds) {
  Connection c(socket(address.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (c.fd < 0) return c;
  int error = connect(c.fd, reinterpret_cast<const sockaddr*>(&address.bytes), address.size) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting = {c.fd, POLLOUT, 0};
    socklen_t size = sizeof error;
    if (poll(&waiting, 1, int(seconds * 1e3)) == 1) getsockopt(c.fd, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) c.close_now();
  return c;
}

// A socket that listens at `port`, 0 for any that is free, of all this machine's addresses; -1 and errno if there can be none.
int listen_at(int port, int backlog) {
  for (int family : {AF_INET6, AF_INET}) {  // IPv6's take IPv4's connections, too
    sockaddr_in6 v6 = {};
    sockaddr_in v4 = {};
    v6.sin6_family = AF_INET6, v6.sin6_port = htons(uint16_t(port));
    v4.sin_family = AF_INET, v4.sin_port = htons(uint16_t(port));
    const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), yes = 1, no = 0;
    if (fd < 0) continue;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    const bool bound = family == AF_INET6 ? bind(fd, reinterpret_cast<sockaddr*>(&v6), sizeof v6) == 0
                                          : bind(fd, reinterpret_cast<sockaddr*>(&v4), sizeof v4) == 0;
    if (bound && listen(fd, backlog) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
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

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

// Where this machine can be reached, as numbers, the best first: loopback is good for a run of one machine alone.
std::vector<std::string> own_addresses() {
  std::vector<std::string> far, near;
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return {host_name()};
  for (const ifaddrs* i = all; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6*>(i->ifa_addr)->sin6_addr))
      continue;  // another machine would need its own interface's name beside it
    char text[NI_MAXHOST];
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    if (getnameinfo(i->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) continue;
    ((i->ifa_flags & IFF_LOOPBACK) != 0 ? near : far).push_back(text);
  }
  freeifaddrs(all);
  far.push_back(host_name());
  far.insert(far.end(), near.begin(), near.end());
  return far;
}

// ----------------------------------------------------------------------------
// Where to meet

const char no_token[] = "-";

std::string file_of(const Ranks& ranks) { return ranks.rendezvous.rfind("file:", 0) == 0 ? ranks.rendezvous.substr(5) : ""; }

// What messages call the place.
std::string place_of(const Ranks& ranks) { return ranks.by_mpi ? "mpirun" : "--rendezvous " + ranks.rendezvous; }

// What may be amiss where somebody waits in vain.
const char* doubt_of(const Ranks& ranks) {
  return ranks.by_mpi ? "can the machines reach each other by TCP?" : "were all processes started, with the same --rendezvous?";
}

struct HostAndPort {
  std::string host, port;
};

// Of tcp:HOST:PORT, where HOST may be [an IPv6 number]. Throws UserError.
HostAndPort host_and_port_of(const Ranks& ranks) {
  const std::string address = ranks.rendezvous.substr(4);
  const size_t colon = address.rfind(':');
  HostAndPort at;
  if (colon != std::string::npos) at = {address.substr(0, colon), address.substr(colon + 1)};
  if (at.host.size() > 1 && at.host.front() == '[' && at.host.back() == ']') at.host = at.host.substr(1, at.host.size() - 2);
  const int port = atoi(at.port.c_str());
  if (at.host.empty() || port < 1 || port > 65535)
    user_error("%s: it must be tcp:HOST:PORT, with a port from 1 to 65535", place_of(ranks).c_str());
  return at;
}

// "TOKEN PORT HOST HOST ...": what rank 0 lets the others know. The token is of this run alone.
std::string invitation_text(const std::string& token, int port) {
  std::string text = token + " " + std::to_string(port);
  for (const std::string& address : own_addresses()) text += " " + address;
  return text + "\n";
}

std::string drawn_token() {
  std::random_device random;
  return format("%08x%08x%08x%08x", random(), random(), random(), random());
}

// Where rank 0 may be.
struct Invitation {
  std::string token, port;
  std::vector<std::string> hosts;  // names or numbers of one machine, to be tried in turn
};

Invitation read_invitation(const std::string& text) {
  Invitation to;
  std::istringstream in(text);
  in >> to.token >> to.port;
  for (std::string host; in >> host;) to.hosts.push_back(host);
  return to;
}

std::string contents(const std::string& path) {  // "" if there is no such file
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// As things are now: a file may be an earlier run's, or not there yet. `by_mpi` is what MPI has brought.
Invitation current_invitation(const Ranks& ranks, const std::string& by_mpi) {
  if (ranks.by_mpi) return read_invitation(by_mpi);
  if (!file_of(ranks).empty()) return read_invitation(contents(file_of(ranks)));
  const HostAndPort at = host_and_port_of(ranks);
  return {no_token, at.port, {at.host}};
}

std::string name_of(int rank, int pid, const std::string& host) { return format("rank %d (pid %d on %s)", rank, pid, host.c_str()); }

constexpr double word_seconds = 5;  // for a short message, of somebody who lives, to come or go
constexpr double knock_seconds = 2;  // likewise, where one can try again

// The connection of a rank that rank 0 has let in at one of the addresses; fd < 0 if this is not rank 0's. Throws UserError if it refuses.
Connection knock(const Ranks& ranks, const std::string& token, const Address& address, std::string& name_of_first) {
  Connection c = connect_to(address, knock_seconds);
  if (c.fd < 0) return c;
  c.out = framed(Kind::hello, format("%s %d %d %d %s", token.c_str(), ranks.rank, ranks.size, int(getpid()), host_name().c_str()));
  Message answer;
  const Taken taken = converse(c, answer, knock_seconds);
  if (taken == Taken::message && answer.kind == Kind::refusal) user_error("%s: %s", place_of(ranks).c_str(), answer.bytes.c_str());
  if (taken != Taken::message || answer.kind != Kind::welcome) return Connection();
  std::istringstream in(answer.bytes);
  int pid = 0;
  std::string host;
  in >> pid >> host;
  name_of_first = name_of(0, pid, host);
  return c;
}

// Looks for rank 0 until it is found.
Connection find_first(const Ranks& ranks, const std::string& by_mpi, double patience_seconds, std::string& name_of_first) {
  for (const double start = seconds_now(); seconds_now() - start < patience_seconds; usleep(20000)) {
    const Invitation to = current_invitation(ranks, by_mpi);
    for (const std::string& host : to.hosts) {
      int error = 0;
      for (const Address& address : addresses_of(host, to.port, error)) {
        Connection c = knock(ranks, to.token, address, name_of_first);
        if (c.fd >= 0) return c;
      }
      if (error != 0 && to.token == no_token) user_error("%s: %s", place_of(ranks).c_str(), gai_strerror(error));
    }
  }
  user_error("%s: rank %d of %d has waited %.0f s for rank 0; %s", place_of(ranks).c_str(), ranks.rank, ranks.size, patience_seconds,
             doubt_of(ranks));
}

void say(const std::string& error) {
  const std::string line = "error: " + error + "\n";
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) {}  // nobody is there to read it
}

const char end_of_run[] = "; the run ends, and -y goes on from its last checkpoint";

}  // namespace

// ----------------------------------------------------------------------------
// The thread

struct Peer {
  Connection connection;
  std::deque<std::string> received[2];  // by topic
  bool has_come = false, has_left = false;
};

// Everything but the first line is whoever's that holds the mutex.
struct RankChannel::State {
  const Ranks ranks;
  const double hang_seconds, beat_seconds;
  std::mutex mutex;
  std::condition_variable changed;  // a rank has come or left, a message has come
  Watchdog watch;
  std::vector<Peer> peers;             // by rank: on rank 0 all others, on the others rank 0
  std::string token;                   // what a stranger must know
  int listener = -1;                   // rank 0's, until all have come
  std::vector<Connection> strangers;   // that have not said yet who they are
  const volatile uint64_t *begun = nullptr, *done = nullptr;
  int excuses = 0;
  double next_beat = 0;
  bool has_failed = false;             // end_run has been called here
  std::string own_error, others_error;
  double others_error_time = 0;
  bool is_ending = false;              // the error has been told
  bool is_leaving = false, stops = false;
  int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // readable: there is more to do than to listen
  std::thread thread;

  State(const Ranks& r, double hang)
      : ranks(r), hang_seconds(hang), beat_seconds(hang > 0 ? std::min(1.0, hang / 4) : 1), watch(r.size, hang), peers(size_t(r.size)) {}
  ~State() {
    {
      const std::lock_guard lock(mutex);
      stops = true;
      wake();
    }
    if (thread.joinable()) thread.join();
    if (listener >= 0) close(listener);
    close(wake_fd);
  }

  void wake() const {
    const uint64_t one = 1;
    if (write(wake_fd, &one, sizeof one) < 0) {}  // it is awake already
  }
  void queue(int rank, Kind kind, const std::string& bytes, Topic topic = Topic::run) {
    Connection& c = peers[size_t(rank)].connection;
    if (c.fd >= 0) c.out += framed(kind, bytes, topic);
    wake();
  }
  void queue_for_all(Kind kind, const std::string& bytes) {
    for (int rank = 0; rank < ranks.size; rank++) queue(rank, kind, bytes);
  }
  void arrive(int rank, Connection&& connection, const std::string& name) {
    peers[size_t(rank)].connection = std::move(connection);
    peers[size_t(rank)].has_come = true;
    watch.arrive(rank, name, seconds_now());
    changed.notify_all();
  }
  RankReport report() const {
    return {begun != nullptr ? *begun : 0, done != nullptr ? *done : 0, begun != nullptr, excuses > 0};
  }

  void serve();
  void wait_for_something(std::unique_lock<std::mutex>& lock);
  void serve_strangers();
  void answer_hello(Connection& stranger, const std::string& hello);
  void serve_peer(int rank);
  void take(int rank, const Message& message);
  void beat();
  void judge();
  void end_all(const std::string& error);
};

void RankChannel::State::serve() {
  sigset_t all;  // signals are other threads' business
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  std::unique_lock lock(mutex);
  while (!stops) {
    wait_for_something(lock);
    if (listener >= 0) serve_strangers();
    for (int rank = 0; rank < ranks.size; rank++)
      if (peers[size_t(rank)].connection.fd >= 0) serve_peer(rank);
    if (is_leaving) {
      changed.notify_all();  // something may have been sent
      continue;
    }
    beat();
    judge();
  }
}

void RankChannel::State::wait_for_something(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> waiting = {{wake_fd, POLLIN, 0}};
  if (listener >= 0) waiting.push_back({listener, POLLIN, 0});
  for (const Connection& c : strangers) waiting.push_back({c.fd, POLLIN, 0});
  for (const Peer& p : peers)
    if (p.connection.fd >= 0) waiting.push_back({p.connection.fd, short(POLLIN | (p.connection.out.empty() ? 0 : POLLOUT)), 0});
  lock.unlock();
  poll(waiting.data(), waiting.size(), 100);  // ms: how exactly a heartbeat's time, and others, are kept
  lock.lock();
  uint64_t ignored;
  if (read(wake_fd, &ignored, sizeof ignored) < 0) {}  // it was something else
}

void RankChannel::State::serve_strangers() {
  for (int fd; (fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) strangers.push_back(Connection(fd));
  for (size_t i = 0; i < strangers.size();) {
    Connection& stranger = strangers[i];
    const bool is_there = stranger.read_some();
    Message message;
    const Taken taken = take_message(stranger.in, message, /*most_bytes=*/1024);
    const bool waits = taken == Taken::nothing_yet && is_there && seconds_now() - stranger.since < word_seconds;
    if (waits) {
      i++;
      continue;
    }
    if (taken == Taken::message && message.kind == Kind::hello && is_there) answer_hello(stranger, message.bytes);
    strangers.erase(strangers.begin() + std::ptrdiff_t(i));
  }
}

// Lets it in, or says why not; of another run, it is told nothing.
void RankChannel::State::answer_hello(Connection& stranger, const std::string& hello) {
  std::istringstream in(hello);
  std::string its_token, host;
  int rank = 0, size = 0, pid = 0;
  in >> its_token >> rank >> size >> pid >> host;
  if (!in || its_token != token) return;
  std::string reason;
  if (size != ranks.size)
    reason = format("rank %d of %d has come to rank 0 of %d; start all with the same --ranks", rank, size, ranks.size);
  else if (rank < 1 || rank >= size || peers[size_t(rank)].has_come)
    reason = format("two processes are rank %d, this one and %s; give each its own --rank", rank,
                    rank == 0 ? "the one that listens" : watch.name(rank).c_str());
  if (reason.empty()) {
    stranger.out = framed(Kind::welcome, format("%d %s", int(getpid()), host_name().c_str()));
    arrive(rank, std::move(stranger), name_of(rank, pid, host));
  } else {
    stranger.out = framed(Kind::refusal, reason);
    stranger.write_some();  // into an empty buffer
  }
}

void RankChannel::State::serve_peer(int rank) {
  Peer& peer = peers[size_t(rank)];
  peer.connection.write_some();
  const bool is_there = peer.connection.read_some();
  Message message;
  Taken taken;
  while ((taken = take_message(peer.connection.in, message)) == Taken::message) take(rank, message);
  CHECK(taken != Taken::nonsense);
  if (is_there) return;
  peer.connection.close_now();
  // Where there is an error to tell, it is why that rank is gone.
  if (!peer.has_left && !is_leaving && others_error.empty()) end_all(watch.name(rank) + " has died" + end_of_run);
}

void RankChannel::State::take(int rank, const Message& message) {
  Peer& peer = peers[size_t(rank)];
  switch (message.kind) {
    case Kind::data: peer.received[size_t(message.topic)].push_back(message.bytes); break;
    case Kind::heartbeat: {
      RankReport report;
      CHECK(message.bytes.size() == sizeof report);
      memcpy(&report, message.bytes.data(), sizeof report);
      watch.hear(rank, report, seconds_now());
      break;
    }
    case Kind::error:
      if (others_error.empty()) others_error = watch.name(rank) + ": " + message.bytes, others_error_time = seconds_now();
      break;
    case Kind::end: _exit(1);
    case Kind::goodbye:
      peer.has_left = true;
      watch.leave(rank);
      break;
    case Kind::hello:
    case Kind::welcome:
    case Kind::refusal: CHECK(false);
  }
  changed.notify_all();
}

void RankChannel::State::beat() {
  const double now = seconds_now();
  const RankReport own = report();
  if (ranks.rank == 0) watch.hear(0, own, now);
  if (now < next_beat) return;
  next_beat = now + beat_seconds;
  queue_for_all(Kind::heartbeat, std::string(reinterpret_cast<const char*>(&own), sizeof own));
}

void RankChannel::State::judge() {
  constexpr double own_error_seconds = 1;  // within which rank 0 meets the error that another has met
  if (is_ending || (ranks.rank == 0 && has_failed)) return end_all(own_error);
  if (!others_error.empty()) {
    if (seconds_now() - others_error_time >= own_error_seconds) end_all(others_error);
    return;
  }
  const std::string verdict = watch.verdict(seconds_now());
  if (!verdict.empty()) end_all(verdict + end_of_run);
}

// Says why, once, and ends this process and, from rank 0, all others. While ranks are still to come it returns: they would look for rank 0
// until their patience ends.
void RankChannel::State::end_all(const std::string& error) {
  if (!std::exchange(is_ending, true)) say(error);
  if (ranks.rank > 0) _exit(1);
  if (listener >= 0) return;
  constexpr double farewell_seconds = 1;
  queue_for_all(Kind::end, "");
  const double start = seconds_now();
  // A connection that is closed with something unread in it may lose what was sent: the others close theirs first.
  for (bool all_gone = false; !all_gone && seconds_now() - start < farewell_seconds; usleep(1000)) {
    all_gone = true;
    for (Peer& p : peers) {
      if (p.connection.fd < 0) continue;
      p.connection.write_some();
      if (!p.connection.read_some()) p.connection.close_now();
      else all_gone = false;
    }
  }
  _exit(1);
}

// ----------------------------------------------------------------------------
// The channel

RankChannel::RankChannel() = default;
RankChannel::~RankChannel() = default;

bool RankChannel::is_open() const { return state_ != nullptr && state_->thread.joinable(); }

// The ranks that have not come: "3", or "3, 5".
static std::string missing(const std::vector<Peer>& peers) {
  std::string numbers;
  for (size_t rank = 1; rank < peers.size(); rank++)
    if (!peers[rank].has_come) numbers += (numbers.empty() ? "" : ", ") + std::to_string(rank);
  return numbers;
}

void RankChannel::open(const Ranks& ranks, double hang_seconds, double patience_seconds) {
  if (ranks.size == 1) return;
  state_ = std::make_unique<State>(ranks, hang_seconds);
  State& s = *state_;
  std::string invitation;
  if (ranks.rank > 0) {
    if (ranks.by_mpi) broadcast_by_mpi(invitation);
    std::string name_of_first;
    Connection connection = find_first(ranks, invitation, patience_seconds, name_of_first);
    s.arrive(0, std::move(connection), name_of_first);
    s.thread = std::thread([&s] { s.serve(); });
    return;
  }
  const std::string path = file_of(ranks);
  const bool by_tcp = !ranks.by_mpi && path.empty();
  s.token = by_tcp ? no_token : drawn_token();
  s.listener = listen_at(by_tcp ? atoi(host_and_port_of(ranks).port.c_str()) : 0, ranks.size);
  if (s.listener < 0) user_error("%s: cannot listen: %s", place_of(ranks).c_str(), strerror(errno));
  invitation = invitation_text(s.token, port_of(s.listener));
  s.watch.arrive(0, name_of(0, int(getpid()), host_name()), seconds_now());
  s.thread = std::thread([&s] { s.serve(); });
  if (ranks.by_mpi) broadcast_by_mpi(invitation);
  if (!path.empty()) {
    write_file_durably(path + ".new", invitation);
    rename_durably(path + ".new", path);
  }
  std::unique_lock lock(s.mutex);
  const bool all_here = s.changed.wait_for(lock, std::chrono::duration<double>(patience_seconds), [&] { return missing(s.peers).empty(); });
  if (!path.empty()) unlink(path.c_str());
  close(std::exchange(s.listener, -1));
  s.strangers.clear();
  if (!all_here)
    user_error("%s: of %d ranks these have not come within %.0f s: %s; %s", place_of(ranks).c_str(), ranks.size, patience_seconds,
               missing(s.peers).c_str(), doubt_of(ranks));
}

void RankChannel::send(int to, Topic topic, const std::string& bytes) {
  CHECK(is_open());
  const std::lock_guard lock(state_->mutex);
  const Peer& peer = state_->peers[size_t(to)];
  CHECK(peer.has_come && !peer.has_left);
  state_->queue(to, Kind::data, bytes, topic);
}

std::string RankChannel::receive(int from, Topic topic) {
  CHECK(is_open());
  std::unique_lock lock(state_->mutex);
  Peer& peer = state_->peers[size_t(from)];
  std::deque<std::string>& messages = peer.received[size_t(topic)];
  state_->changed.wait(lock, [&] { return !messages.empty() || peer.has_left; });
  CHECK(!messages.empty());  // it has left without sending what was expected of it
  const std::string message = std::move(messages.front());
  messages.pop_front();
  return message;
}

std::string RankChannel::broadcast(const std::string& text) {
  if (state_ == nullptr) return text;
  if (state_->ranks.rank > 0) return receive(0, Topic::run);
  for (int rank = 1; rank < state_->ranks.size; rank++) send(rank, Topic::run, text);
  return text;
}

void RankChannel::broadcast(void* bytes, size_t count) {
  const std::string shared = broadcast(std::string(static_cast<const char*>(bytes), count));
  CHECK(shared.size() == count);
  memcpy(bytes, shared.data(), count);
}

// How `theirs` is not `mine`: the first lines that differ.
static std::string difference(const std::string& name, const char* what, const std::string& theirs, const std::string& mine) {
  std::istringstream a(theirs), b(mine);
  std::string its_line, my_line;
  do {
    if (!std::getline(a, its_line)) its_line.clear();
    if (!std::getline(b, my_line)) my_line.clear();
  } while (its_line == my_line && (a || b));
  return format("%s: %s has \"%s\", where rank 0 has \"%s\"; all ranks need the same", what, name.c_str(), its_line.c_str(),
                my_line.c_str());
}

void RankChannel::check_same_on_all_ranks(const char* what, const std::string& mine) {
  if (state_ == nullptr) return;
  std::string verdict;
  if (state_->ranks.rank > 0) send(0, Topic::run, mine);
  for (int rank = 1; state_->ranks.rank == 0 && rank < state_->ranks.size; rank++) {
    const std::string theirs = receive(rank, Topic::run);
    if (theirs != mine && verdict.empty()) verdict = difference(state_->watch.name(rank), what, theirs, mine);
  }
  verdict = broadcast(verdict);
  if (!verdict.empty()) throw UserError(verdict);
}

void RankChannel::watch_progress(const volatile uint64_t* begun, const volatile uint64_t* done) {
  if (state_ == nullptr) return;
  const std::lock_guard lock(state_->mutex);
  state_->begun = begun, state_->done = done;
}

void RankChannel::end_run(const std::string& error) {
  CHECK(is_open());
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  s.own_error = error, s.has_failed = true;
  if (s.ranks.rank > 0) s.queue(0, Kind::error, error);
  s.wake();
  // The thread ends this process, here at once, elsewhere when rank 0 says so.
  if (s.ranks.rank == 0) s.changed.wait(lock, [] { return false; });
  s.changed.wait_for(lock, std::chrono::duration<double>(word_seconds), [] { return false; });
  say(format("rank %d: %s", s.ranks.rank, error.c_str()));
  _exit(1);
}

void RankChannel::leave() {
  if (state_ == nullptr) return;
  {
    State& s = *state_;
    std::unique_lock lock(s.mutex);
    s.is_leaving = true;
    s.queue_for_all(Kind::goodbye, "");
    s.changed.wait_for(lock, std::chrono::duration<double>(word_seconds), [&s] {
      for (const Peer& p : s.peers)
        if (p.has_come && !(p.has_left && p.connection.out.empty())) return false;
      return true;
    });
  }
  state_.reset();
}

WatchdogPause::WatchdogPause(RankChannel& channel) : channel_(channel) {
  if (channel_.state_ == nullptr) return;
  const std::lock_guard lock(channel_.state_->mutex);
  channel_.state_->excuses++;
}

WatchdogPause::~WatchdogPause() {
  if (channel_.state_ == nullptr) return;
  const std::lock_guard lock(channel_.state_->mutex);
  channel_.state_->excuses--;
}
