#include "rank_channel.h"
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>
#include "llmc/utils/clock.h"
#include "llmc/utils/error.h"
#include "llmc/utils/files.h"
#include "llmc/utils/host_name.h"
#include "llmc/utils/message.h"
#include "llmc/utils/number.h"
#include "llmc/utils/text.h"
#include "hmac.h"
#include "tcp.h"
#include "watchdog.h"

namespace {

// ----------------------------------------------------------------------------
// Messages

enum class Kind : uint32_t {
  challenge,  // of rank 0 to whoever connects: a nonce
  hello,      // proof, nonce, rank, size, pid, host of a process that asks to be accepted
  accept,     // proof, pid, host of rank 0
  reject,     // proof, the reason
  stranger,   // to one whose hello proves nothing
  part,       // of a message that is longer than a frame, before its last frame
  data,       // of send
  heartbeat,  // a RankReport
  error,      // to rank 0: why another rank ends
  abort,      // from rank 0: end at once, the error has been printed
  finalize,   // clean shutdown
  count
};

// Both ends are this program, on machines of the same architecture.
struct Header {
  uint32_t magic;
  Kind kind;
  Topic topic;
  uint32_t unused;
  uint64_t bytes;  // that follow
};
constexpr uint32_t channel_magic = 0x32414c53;  // "SLA2"
// No frame is longer, so that none makes its receiver take memory for what is announced and never comes.
constexpr size_t max_frame_bytes = size_t(1) << 20;
constexpr size_t max_handshake_bytes = 1024;  // before the other end is known to be of this run

// The message in frames.
std::string framed(Kind kind, const std::string& bytes, Topic topic = Topic::run) {
  std::string frames;
  for (size_t at = 0; at == 0 || at < bytes.size(); at += max_frame_bytes) {
    const size_t count = std::min(bytes.size() - at, max_frame_bytes);
    const bool is_last = at + count == bytes.size();
    const Header header = {channel_magic, is_last ? kind : Kind::part, topic, 0, count};
    frames.append(reinterpret_cast<const char*>(&header), sizeof header).append(bytes, at, count);
  }
  return frames;
}

struct Message {
  Kind kind;
  Topic topic;
  std::string bytes;
};

enum class Parsed { message, incomplete, invalid };

// Removes the first frame from the front of `in`. It is invalid if it is none or longer than `max_bytes`.
Parsed parse_message(std::string& in, Message& message, size_t max_bytes) {
  Header header;
  if (in.size() < sizeof header) return Parsed::incomplete;
  memcpy(&header, in.data(), sizeof header);
  if (header.magic != channel_magic || header.kind >= Kind::count || header.topic >= Topic::count ||
      header.bytes > max_bytes)
    return Parsed::invalid;
  if (in.size() < sizeof header + header.bytes) return Parsed::incomplete;
  message = {header.kind, header.topic, in.substr(sizeof header, header.bytes)};
  in.erase(0, sizeof header + header.bytes);
  return Parsed::message;
}

// What a handshake still reads, and its first message.
Parsed read_handshake(Connection& c, Message& message, bool& is_open) {
  is_open = c.read_some(sizeof(Header) + max_handshake_bytes - c.in.size());
  return parse_message(c.in, message, max_handshake_bytes);
}

// Sends c.out and waits until `end` for a handshake's next message.
std::optional<Message> await_message(Connection& c, double end) {
  Message message;
  bool is_open = true;
  for (double left; is_open && (left = end - seconds_now()) > 0;) {
    pollfd ready = {c.fd, short(POLLIN | (c.out.empty() ? 0 : POLLOUT)), 0};
    poll(&ready, 1, int(left * 1e3) + 1);
    c.write_some();
    const Parsed parsed = read_handshake(c, message, is_open);
    if (parsed == Parsed::message) return message;
    if (parsed == Parsed::invalid) break;
  }
  return std::nullopt;
}

// ----------------------------------------------------------------------------
// Proofs: both ends of a connection show that they know the run's key, which no message contains. Each draws a nonce
// for the connection, and what it proves contains the other's: what somebody has overheard proves nothing later.

constexpr size_t nonce_bytes = 32, proof_bytes = 32;

std::string random_hex() {
  uint64_t random[2];
  CHECK(getentropy(random, sizeof random) == 0);
  return format("%016llx%016llx", (unsigned long long)random[0], (unsigned long long)random[1]);
}

// The text of a handshake's message of some kind, after its proof.
std::string with_proof(const std::string& key, Kind kind, const std::string& nonces, const std::string& text) {
  return hmac_sha256(key, format("%d %s ", int(kind), nonces.c_str()) + text) + text;
}

// The text of such a message; nullopt if its proof is none.
std::optional<std::string> proven_text(const std::string& key, const std::string& nonces, const Message& message) {
  if (message.bytes.size() < proof_bytes) return std::nullopt;
  const std::string text = message.bytes.substr(proof_bytes);
  const std::string expected = with_proof(key, message.kind, nonces, text);
  unsigned char differs = 0;  // takes as long wherever the difference is, and so does not tell where
  for (size_t i = 0; i < proof_bytes; i++) differs |= (unsigned char)(expected[i] ^ message.bytes[i]);
  return differs == 0 ? std::optional(text) : std::nullopt;
}

// ----------------------------------------------------------------------------
// Rendezvous: how the other ranks find rank 0

// PATH of file:PATH; otherwise "".
std::string rendezvous_file(const Ranks& ranks) {
  return begins_with(ranks.rendezvous, "file:") ? ranks.rendezvous.substr(5) : "";
}

// The rendezvous, in messages.
std::string rendezvous_name(const Ranks& ranks) { return ranks.by_mpi ? "mpirun" : "--rendezvous " + ranks.rendezvous; }

// What to check after a timeout.
const char* timeout_hint(const Ranks& ranks) {
  return ranks.by_mpi ? "can the machines reach each other by TCP?"
                      : "were all processes started, with the same --rendezvous and secret?";
}

struct HostAndPort {
  std::string host;
  int port = 0;
};

// The host and the port of a rendezvous tcp:HOST:PORT, where HOST may be [an IPv6 number]. Throws UserError.
HostAndPort host_and_port_of(const Ranks& ranks) {
  const std::string address = ranks.rendezvous.substr(4);
  const size_t colon = address.rfind(':');
  HostAndPort at;
  try {
    if (colon != std::string::npos) at = {address.substr(0, colon), parse_number<int>(address.substr(colon + 1))};
  } catch (const UserError&) {}  // port 0 is none, either
  if (at.host.size() > 1 && at.host.front() == '[' && at.host.back() == ']')
    at.host = at.host.substr(1, at.host.size() - 2);
  if (at.host.empty() || at.port < 1 || at.port > 65535)
    user_error("%s: it must be tcp:HOST:PORT, with a port from 1 to 65535", rendezvous_name(ranks));
  return at;
}

// Whether ranks find rank 0 at an address that is given, in place of being told by it.
bool is_by_tcp(const Ranks& ranks) { return !ranks.by_mpi && rendezvous_file(ranks).empty(); }

// Whoever has no secret can be told from a stranger only by where it is.
bool is_for_this_machine_alone(const Ranks& ranks) { return is_by_tcp(ranks) && ranks.secret.empty(); }

// Where rank 0 may be. As text: "TOKEN PORT HOST HOST ...".
struct Endpoint {
  std::string token, port;         // rank 0 draws the token for each run; those whom it tells belong to the run
  std::vector<std::string> hosts;  // names or numbers of one machine, to be tried in turn
};

std::string endpoint_text(const std::string& token, int port) {
  std::string text = token + " " + std::to_string(port);
  for (const std::string& address : own_addresses()) text += " " + address;
  return text + "\n";
}

Endpoint parse_endpoint(const std::string& text) {
  Endpoint endpoint;
  std::istringstream in(text);
  in >> endpoint.token >> endpoint.port;
  for (std::string host; in >> host;) endpoint.hosts.push_back(host);
  return endpoint;
}

// What all ranks of a run know, and nobody else.
std::string key_of(const Ranks& ranks, const std::string& token) { return "gpt2-sla " + token + " " + ranks.secret; }

// The text of the rendezvous file. Throws UserError if it cannot be read, or a stranger may have written or read it;
// with a secret that does not matter.
std::string rendezvous_text(const Ranks& ranks) {
  const std::string path = rendezvous_file(ranks);
  return ranks.secret.empty() ? read_private_file(path, "give all ranks a secret (SLA_RENDEZVOUS_SECRET)")
                              : read_whole_file(path);
}

// For rank 0. Only this user can read the file, and what has the name is replaced, not written to.
void write_rendezvous_file(const Ranks& ranks, const std::string& text) {
  const std::string path = rendezvous_file(ranks);
  std::string temporary = path + ".tmp.XXXXXX";
  const FileDescriptor file(mkstemp(temporary.data()));
  if (file.fd < 0 || write_all(file.fd, text.data(), text.size()) != text.size() || fsync(file.fd) != 0)
    user_error("%s: cannot write %s: %s", rendezvous_name(ranks), temporary, strerror(errno));
  rename_durably(temporary, path);
  rendezvous_text(ranks);  // a file system may keep no permissions
}

// The endpoint as of now: a rendezvous file may not exist yet, or be an earlier run's or a stranger's; then `problem`
// says why. `by_mpi` is the text that MPI has broadcast.
Endpoint current_endpoint(const Ranks& ranks, const std::string& by_mpi, std::string& problem) {
  if (ranks.by_mpi) return parse_endpoint(by_mpi);
  if (is_by_tcp(ranks)) {
    const HostAndPort at = host_and_port_of(ranks);
    return {"", std::to_string(at.port), {is_for_this_machine_alone(ranks) ? loopback_address : at.host}};
  }
  try {
    return parse_endpoint(rendezvous_text(ranks));
  } catch (const UserError& e) { problem = e.what(); }
  return {};
}

// Throws UserError if a rank without a secret is to connect to another machine.
void check_secret(const Ranks& ranks) {
  if (!is_for_this_machine_alone(ranks)) return;
  const HostAndPort at = host_and_port_of(ranks);
  int error = 0;
  const std::vector<Address> all = addresses_of(at.host, "0", error);
  if (error != 0) user_error("%s: %s", rendezvous_name(ranks), gai_strerror(error));
  for (const Address& address : all)
    if (is_own(address)) return;
  user_error("%s: %s is not this machine, and ranks of several need a secret; give all of them the same "
             "SLA_RENDEZVOUS_SECRET or --rendezvous-secret",
             rendezvous_name(ranks), at.host);
}

std::string name_of(int rank, int pid, const std::string& host) {
  return format("rank %d (pid %d on %s)", rank, pid, host.c_str());
}

constexpr double message_seconds = 5;    // within which a short message arrives from a live process
constexpr double handshake_seconds = 2;  // within which a handshake, which is retried, is answered

// A connection to `address` that rank 0 of this run has accepted; fd is -1 if there is none. Throws UserError if rank 0
// rejects this rank.
Connection handshake(const Ranks& ranks, const std::string& token, const Address& address,
                     std::string& name_of_rank_0) {
  Connection c = connect_to(address, handshake_seconds);
  if (c.fd < 0) return c;
  const double end = seconds_now() + handshake_seconds;
  const std::optional<Message> challenge = await_message(c, end);
  if (!challenge || challenge->kind != Kind::challenge || challenge->bytes.size() != nonce_bytes) return Connection();
  const std::string key = key_of(ranks, token), nonce = random_hex();
  c.out = framed(Kind::hello, with_proof(key, Kind::hello, challenge->bytes,
                                         format("%s %d %d %d %s", nonce.c_str(), ranks.rank, ranks.size, int(getpid()),
                                                host_name().c_str())));
  const std::optional<Message> answer = await_message(c, end);
  if (!answer) return Connection();
  if (answer->kind == Kind::stranger && is_by_tcp(ranks))
    user_error("%s: rank 0 has another secret than rank %d; give all ranks the same SLA_RENDEZVOUS_SECRET or "
               "--rendezvous-secret",
               rendezvous_name(ranks), ranks.rank);
  const std::optional<std::string> text = proven_text(key, challenge->bytes + nonce, *answer);
  if (text && answer->kind == Kind::reject) user_error("%s: %s", rendezvous_name(ranks), *text);
  if (!text || answer->kind != Kind::accept) return Connection();
  std::istringstream in(*text);
  int pid = 0;
  std::string host;
  in >> pid >> host;
  name_of_rank_0 = name_of(0, pid, host);
  return c;
}

// Tries to connect to rank 0 until it succeeds. Throws UserError after timeout_seconds.
Connection connect_to_rank_0(const Ranks& ranks, const std::string& by_mpi, double timeout_seconds,
                             std::string& name_of_rank_0) {
  std::string problem = timeout_hint(ranks);
  for (const double start = seconds_now(); seconds_now() - start < timeout_seconds; usleep(20000)) {
    const Endpoint endpoint = current_endpoint(ranks, by_mpi, problem);
    for (const std::string& host : endpoint.hosts) {
      int error = 0;
      for (const Address& address : addresses_of(host, endpoint.port, error)) {
        Connection c = handshake(ranks, endpoint.token, address, name_of_rank_0);
        if (c.fd >= 0) return c;
      }
      if (error != 0 && is_by_tcp(ranks)) user_error("%s: %s", rendezvous_name(ranks), gai_strerror(error));
    }
  }
  user_error("%s: rank %d of %d has waited %.0f s for rank 0; %s", rendezvous_name(ranks), ranks.rank, ranks.size,
             timeout_seconds, problem);
}

void write_error(const std::string& error) {  // without stdio, whose lock another thread may hold
  const std::string line = message_line("error", error);
  write_all(STDERR_FILENO, line.data(), line.size());
}

const char run_ends[] = "; the run ends, and -y resumes from its last checkpoint";

}  // namespace

// ----------------------------------------------------------------------------
// The channel's thread

// Somebody who has connected to rank 0 and has not proven to be a rank.
struct Pending {
  Connection connection;
  std::string nonce;
};

struct Peer {
  Connection connection;
  std::deque<std::string> received[size_t(Topic::count)];
  std::string parts[size_t(Topic::count)];  // of a message that has not come whole
  bool is_connected = false;                // since its handshake
  bool has_finalized = false;
};

// The first line is constant; everything else is guarded by the mutex.
struct RankChannel::State {
  const Ranks ranks;
  const double hang_seconds, heartbeat_seconds;
  std::mutex mutex;
  std::condition_variable changed;  // a rank has connected or finalized, or a message has arrived
  Watchdog watchdog;
  std::vector<Peer> peers;      // by rank: on rank 0 all others, on the others rank 0
  std::string key;              // a hello must prove that its sender knows it
  int listener = -1;            // the socket on which rank 0 listens until all are connected
  std::deque<Pending> pending;  // the oldest first
  int num_refused = 0;          // connections whose hello proved nothing
  std::string last_refused;     // the address of the last
  const volatile uint64_t *begun = nullptr, *done = nullptr;
  int num_pauses = 0;  // WatchdogPause objects
  double next_heartbeat = 0;
  bool has_failed = false;  // end_run has been called here
  std::string own_error, others_error;
  double others_error_time = 0;
  bool is_aborting = false;  // the error has been printed
  bool is_finalizing = false, stops = false;
  int wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);  // readable: the thread has something to do
  std::thread thread;

  State(const Ranks& r, double hang)
      : ranks(r), hang_seconds(hang), heartbeat_seconds(hang > 0 ? std::min(1.0, hang / 4) : 1), watchdog(r.size, hang),
        peers(r.size) {}
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
    if (write(wake_fd, &one, sizeof one) < 0) {}  // it is readable already
  }
  void queue(int rank, Kind kind, const std::string& bytes, Topic topic = Topic::run) {
    Connection& c = peers[rank].connection;
    if (c.fd >= 0) c.out += framed(kind, bytes, topic);
    wake();
  }
  void queue_for_all(Kind kind, const std::string& bytes) {
    for (int rank = 0; rank < ranks.size; rank++) queue(rank, kind, bytes);
  }
  void add_peer(int rank, Connection&& connection, const std::string& name) {
    peers[rank].connection = std::move(connection);
    peers[rank].is_connected = true;
    watchdog.add(rank, name, seconds_now());
    changed.notify_all();
  }
  RankReport report() const {
    return {begun != nullptr ? *begun : 0, done != nullptr ? *done : 0, begun != nullptr, num_pauses > 0};
  }
  // The ranks that are not connected: "3", or "3, 5".
  std::string missing_ranks() const {
    std::string numbers;
    for (int rank = 1; rank < ranks.size; rank++)
      if (!peers[rank].is_connected) numbers += (numbers.empty() ? "" : ", ") + std::to_string(rank);
    return numbers;
  }

  void connect_as_other_rank(double timeout_seconds);
  void connect_as_rank_0(double timeout_seconds);
  void serve();
  void wait_for_events(std::unique_lock<std::mutex>& lock);
  void serve_pending();
  void answer_hello(Pending& sender, const Message& hello);
  void serve_peer(int rank);
  bool handle(int rank, Message& message);
  void send_heartbeats();
  void check_for_errors();
  void abort_run(const std::string& error);
};

void RankChannel::State::serve() {
  sigset_t all;  // this thread handles no signals
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);
  std::unique_lock lock(mutex);
  while (!stops) {
    wait_for_events(lock);
    if (listener >= 0) serve_pending();
    for (int rank = 0; rank < ranks.size; rank++)
      if (peers[rank].connection.fd >= 0) serve_peer(rank);
    if (is_finalizing) {
      changed.notify_all();  // finalize() waits until everything is sent
      continue;
    }
    send_heartbeats();
    check_for_errors();
  }
}

void RankChannel::State::wait_for_events(std::unique_lock<std::mutex>& lock) {
  std::vector<pollfd> fds = {{wake_fd, POLLIN, 0}};
  if (listener >= 0) fds.push_back({listener, POLLIN, 0});
  for (const Pending& p : pending) fds.push_back({p.connection.fd, POLLIN, 0});
  for (const Peer& p : peers)
    if (p.connection.fd >= 0)
      fds.push_back({p.connection.fd, short(POLLIN | (p.connection.out.empty() ? 0 : POLLOUT)), 0});
  lock.unlock();
  poll(fds.data(), fds.size(), 100);  // ms: the precision of heartbeats and timeouts
  lock.lock();
  uint64_t ignored;
  if (read(wake_fd, &ignored, sizeof ignored) < 0) {}  // another descriptor was ready
}

void RankChannel::State::serve_pending() {
  // All ranks may connect at once. If strangers do, too, the oldest goes: a rank needs milliseconds, and tries again.
  const size_t max_pending = size_t(ranks.size) + 64;
  for (size_t i = 0; i < max_pending; i++) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) break;
    if (pending.size() == max_pending) pending.pop_front();
    pending.push_back({Connection(fd), random_hex()});
    pending.back().connection.out = framed(Kind::challenge, pending.back().nonce);
    pending.back().connection.write_some();  // fits: nothing has been sent before
  }
  for (size_t i = 0; i < pending.size();) {
    Connection& c = pending[i].connection;
    bool is_open;
    Message message;
    const Parsed parsed = read_handshake(c, message, is_open);
    const bool waits = parsed == Parsed::incomplete && is_open && seconds_now() - c.since < handshake_seconds;
    if (waits) {
      i++;
      continue;
    }
    if (parsed == Parsed::message && message.kind == Kind::hello && is_open) answer_hello(pending[i], message);
    pending.erase(pending.begin() + std::ptrdiff_t(i));
  }
}

// Accepts or rejects a process.
void RankChannel::State::answer_hello(Pending& sender, const Message& hello) {
  Connection& connection = sender.connection;
  const std::optional<std::string> text = proven_text(key, sender.nonce, hello);
  if (!text) {
    num_refused++, last_refused = address_of_peer(connection);
    connection.out = framed(Kind::stranger, "");
    return connection.write_some();
  }
  std::istringstream in(*text);
  std::string its_nonce, host;
  int rank = 0, size = 0, pid = 0;
  in >> its_nonce >> rank >> size >> pid >> host;
  std::string reason;
  if (in.fail() || rank < 0 || rank >= size)
    reason = "rank 0 cannot read what this rank says of itself; start the same program on all machines";
  else if (size != ranks.size)
    reason =
        format("rank %d of %d has connected to rank 0 of %d; start all with the same --ranks", rank, size, ranks.size);
  else if (rank == 0 || peers[rank].is_connected)
    reason = format("two processes are rank %d, this one and %s; give each its own --rank", rank,
                    rank == 0 ? "the one that listens" : watchdog.name(rank).c_str());
  const Kind kind = reason.empty() ? Kind::accept : Kind::reject;
  const std::string own_name = format("%d %s", int(getpid()), host_name().c_str());
  connection.out = framed(kind, with_proof(key, kind, sender.nonce + its_nonce, reason.empty() ? own_name : reason));
  if (reason.empty()) add_peer(rank, std::move(connection), name_of(rank, pid, host));
  else connection.write_some();
}

void RankChannel::State::serve_peer(int rank) {
  Peer& peer = peers[rank];
  peer.connection.write_some();
  const bool is_open = peer.connection.read_some();
  Message message;
  Parsed parsed;
  bool is_sent_by_ranks = true;
  while ((parsed = parse_message(peer.connection.in, message, max_frame_bytes)) == Parsed::message)
    is_sent_by_ranks = is_sent_by_ranks && handle(rank, message);
  if (parsed == Parsed::invalid || !is_sent_by_ranks) {
    peer.connection.in.clear();
    abort_run(watchdog.name(rank) + " has sent what this program does not send; start the same on all machines" +
              run_ends);
  }
  if (is_open) return;
  peer.connection.close_now();
  // If a rank has reported an error, that is why this one is gone.
  if (!peer.has_finalized && !is_finalizing && others_error.empty())
    abort_run(watchdog.name(rank) + " has died" + run_ends);
}

// Returns whether another rank sends such a message.
bool RankChannel::State::handle(int rank, Message& message) {
  Peer& peer = peers[rank];
  std::string& parts = peer.parts[size_t(message.topic)];
  if (message.kind == Kind::part) return parts += message.bytes, true;
  message.bytes = std::exchange(parts, "") + message.bytes;
  switch (message.kind) {
    case Kind::data: peer.received[size_t(message.topic)].push_back(message.bytes); break;
    case Kind::heartbeat: {
      std::istringstream in(message.bytes);
      RankReport report;
      if (!(in >> report.begun >> report.done >> report.is_watched >> report.is_paused)) return false;
      watchdog.heartbeat(rank, report, seconds_now());
      break;
    }
    case Kind::error:
      if (ranks.rank > 0) return false;
      if (others_error.empty())
        others_error = watchdog.name(rank) + ": " + message.bytes, others_error_time = seconds_now();
      break;
    case Kind::abort:
      if (ranks.rank == 0) return false;
      _exit(1);
    case Kind::finalize:
      peer.has_finalized = true;
      watchdog.remove(rank);
      break;
    default: return false;  // belongs to a handshake
  }
  changed.notify_all();
  return true;
}

void RankChannel::State::send_heartbeats() {
  const double now = seconds_now();
  const RankReport own = report();
  if (ranks.rank == 0) watchdog.heartbeat(0, own, now);
  if (now < next_heartbeat) return;
  next_heartbeat = now + heartbeat_seconds;
  queue_for_all(Kind::heartbeat, format("%llu %llu %d %d", (unsigned long long)own.begun, (unsigned long long)own.done,
                                        own.is_watched, own.is_paused));
}

void RankChannel::State::check_for_errors() {
  constexpr double own_error_seconds = 1;  // within which rank 0 gets the same error that another rank has reported
  if (is_aborting || (ranks.rank == 0 && has_failed)) return abort_run(own_error);
  if (!others_error.empty()) {
    if (seconds_now() - others_error_time >= own_error_seconds) abort_run(others_error);
    return;
  }
  const std::string verdict = watchdog.verdict(seconds_now());
  if (!verdict.empty()) abort_run(verdict + run_ends);
}

// Prints the error, once, and ends this process and, if it is rank 0, all others. Returns while ranks are still to
// connect, which then get the abort message, too: they would otherwise try to connect until their timeout.
void RankChannel::State::abort_run(const std::string& error) {
  if (!std::exchange(is_aborting, true)) write_error(error);
  if (ranks.rank > 0) _exit(1);
  if (listener >= 0) return;
  constexpr double abort_seconds = 1;
  queue_for_all(Kind::abort, "");
  const double start = seconds_now();
  // A connection that is closed while it has unread data may lose what was sent: the others close theirs first.
  for (bool all_closed = false; !all_closed && seconds_now() - start < abort_seconds; usleep(1000)) {
    all_closed = true;
    for (Peer& p : peers) {
      if (p.connection.fd < 0) continue;
      p.connection.write_some();
      if (!p.connection.read_some()) p.connection.close_now();
      else all_closed = false;
    }
  }
  _exit(1);
}

// ----------------------------------------------------------------------------
// The channel

RankChannel::RankChannel() = default;
RankChannel::~RankChannel() = default;

bool RankChannel::is_open() const { return state_ != nullptr && state_->thread.joinable(); }

void RankChannel::open(const Ranks& ranks, double hang_seconds, double timeout_seconds) {
  if (ranks.size == 1) return;
  hmac_sha256("", "");  // an error of this thread, if there is none
  check_secret(ranks);
  state_ = std::make_unique<State>(ranks, hang_seconds);
  if (ranks.rank > 0) state_->connect_as_other_rank(timeout_seconds);
  else state_->connect_as_rank_0(timeout_seconds);
}

void RankChannel::State::connect_as_other_rank(double timeout_seconds) {
  std::string by_mpi, name_of_rank_0;
  if (ranks.by_mpi) broadcast_by_mpi(by_mpi);
  Connection connection = connect_to_rank_0(ranks, by_mpi, timeout_seconds, name_of_rank_0);
  add_peer(0, std::move(connection), name_of_rank_0);
  thread = std::thread([this] { serve(); });
}

void RankChannel::State::connect_as_rank_0(double timeout_seconds) {
  const std::string path = rendezvous_file(ranks);
  const std::string token = is_by_tcp(ranks) ? "" : random_hex();
  key = key_of(ranks, token);
  listener = listen_at(is_by_tcp(ranks) ? host_and_port_of(ranks).port : 0, is_for_this_machine_alone(ranks));
  if (listener < 0) user_error("%s: cannot listen: %s", rendezvous_name(ranks), strerror(errno));
  if (is_for_this_machine_alone(ranks)) {
    printf("--rendezvous without a secret: rank 0 listens at %s, for ranks of this machine alone\n", loopback_address);
    fflush(stdout);
  }
  std::string endpoint = endpoint_text(token, port_of(listener));
  watchdog.add(0, name_of(0, int(getpid()), host_name()), seconds_now());
  thread = std::thread([this] { serve(); });
  if (ranks.by_mpi) broadcast_by_mpi(endpoint);
  if (!path.empty()) write_rendezvous_file(ranks, endpoint);
  std::unique_lock lock(mutex);
  const bool all_connected = changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                              [this] { return missing_ranks().empty(); });
  if (!path.empty()) unlink(path.c_str());
  close(std::exchange(listener, -1));
  pending.clear();
  const std::string refused =
      format("%d that did not know the secret were refused, the last from %s; ", num_refused, last_refused.c_str());
  if (!all_connected)
    user_error("%s: of %d ranks these have not connected within %.0f s: %s; %s%s", rendezvous_name(ranks), ranks.size,
               timeout_seconds, missing_ranks(), num_refused > 0 ? refused : "", timeout_hint(ranks));
}

void RankChannel::send(int to, Topic topic, const std::string& bytes) {
  CHECK(is_open());
  const std::lock_guard lock(state_->mutex);
  const Peer& peer = state_->peers[to];
  CHECK(peer.is_connected);
  if (peer.has_finalized) user_error("%s has ended its run before this rank", state_->watchdog.name(to));
  state_->queue(to, Kind::data, bytes, topic);
}

std::string RankChannel::receive(int from, Topic topic) {
  CHECK(is_open());
  std::unique_lock lock(state_->mutex);
  Peer& peer = state_->peers[from];
  std::deque<std::string>& messages = peer.received[size_t(topic)];
  state_->changed.wait(lock, [&] { return !messages.empty() || peer.has_finalized; });
  if (messages.empty()) user_error("%s has ended its run before this rank", state_->watchdog.name(from));
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
  const std::string received = broadcast(std::string(static_cast<const char*>(bytes), count));
  if (received.size() != count)
    user_error("%s has sent %zu bytes in place of %zu; start the same program on all machines",
               state_->watchdog.name(0), received.size(), count);
  memcpy(bytes, received.data(), count);
}

// The error for `theirs` of rank `name`, which differs from `mine`: the first lines that differ.
static std::string difference(const std::string& name, const char* what, const std::string& theirs,
                              const std::string& mine) {
  std::istringstream a(theirs), b(mine);
  std::string its_line, my_line;
  do {
    if (!std::getline(a, its_line)) its_line.clear();
    if (!std::getline(b, my_line)) my_line.clear();
  } while (its_line == my_line && (a || b));
  return format("%s: %s has \"%s\", where rank 0 has \"%s\"; all ranks need the same", what, name.c_str(),
                its_line.c_str(), my_line.c_str());
}

void RankChannel::check_same_on_all_ranks(const char* what, const std::string& mine) {
  if (state_ == nullptr) return;
  std::string error;
  if (state_->ranks.rank > 0) send(0, Topic::run, mine);
  for (int rank = 1; state_->ranks.rank == 0 && rank < state_->ranks.size; rank++) {
    const std::string theirs = receive(rank, Topic::run);
    if (theirs != mine && error.empty()) error = difference(state_->watchdog.name(rank), what, theirs, mine);
  }
  error = broadcast(error);
  if (!error.empty()) throw UserError(error);
}

void RankChannel::check_distinct_on_all_ranks(const char* what, const std::string& mine) {
  if (state_ == nullptr) return;
  std::string error;
  std::map<std::string, int> first_rank = {{mine, 0}};  // text -> the first rank that has it
  if (state_->ranks.rank > 0) send(0, Topic::run, mine);
  for (int rank = 1; state_->ranks.rank == 0 && rank < state_->ranks.size; rank++) {
    const auto [it, is_new] = first_rank.insert({receive(rank, Topic::run), rank});
    if (is_new || !error.empty()) continue;
    error = format("%s: %s and %s have the same one, %s; each rank needs one of its own", what,
                   state_->watchdog.name(it->second).c_str(), state_->watchdog.name(rank).c_str(), it->first.c_str());
  }
  error = broadcast(error);
  if (!error.empty()) throw UserError(error);
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
  // The channel's thread ends this process: on rank 0 at once, on the others when rank 0 sends the abort message.
  if (s.ranks.rank == 0) s.changed.wait(lock, [] { return false; });
  s.changed.wait_for(lock, std::chrono::duration<double>(message_seconds), [] { return false; });
  write_error(format("rank %d: %s", s.ranks.rank, error.c_str()));
  _exit(1);
}

void RankChannel::finalize() {
  if (state_ == nullptr) return;
  {
    State& s = *state_;
    std::unique_lock lock(s.mutex);
    s.is_finalizing = true;
    s.queue_for_all(Kind::finalize, "");
    s.changed.wait_for(lock, std::chrono::duration<double>(message_seconds), [&s] {
      for (const Peer& p : s.peers)
        if (p.is_connected && !(p.has_finalized && p.connection.out.empty())) return false;
      return true;
    });
  }
  state_.reset();
}

WatchdogPause::WatchdogPause(RankChannel& channel) : channel_(channel) {
  if (channel_.state_ == nullptr) return;
  const std::lock_guard lock(channel_.state_->mutex);
  channel_.state_->num_pauses++;
}

WatchdogPause::~WatchdogPause() {
  if (channel_.state_ == nullptr) return;
  const std::lock_guard lock(channel_.state_->mutex);
  channel_.state_->num_pauses--;
}
