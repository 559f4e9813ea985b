#include "tessera/comm/bootstrap/handshake.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "tessera/base/text.h"
#include "tessera/comm/bootstrap/address.h"

namespace tessera::comm {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kAttemptTime = 5s;  // until rank 0 must have answered one connection

/// Both proofs cover all messages so far; the first word prevents reusing one side's proof as the other's.
Digest prove_hello(const Digest& key, const protocol::Challenge& challenge, protocol::Hello hello) {
  hello.proof = {};
  return prove(key, "hello" + protocol::encode(challenge) + protocol::encode(hello));
}

Digest prove_reply(const Digest& key, const protocol::Challenge& challenge, const protocol::Hello& hello,
                   protocol::HandshakeReply reply) {
  reply.proof = {};
  return prove(key, "answer" + protocol::encode(challenge) + protocol::encode(hello) + protocol::encode(reply));
}

/// For a hello or an identity.
template <class T>
std::string start_of(const T& subject) {
  const auto part = [](const char* name, std::uint64_t number) {
    return number > 0 ? std::string(", ") + name + " " + std::to_string(number) : "";
  };
  return "run '" + subject.run + "'" + part("restart", subject.restart) + part("generation", subject.generation);
}

/// Increases from one start of a run to the next, and within one from world to world.
template <class T>
std::pair<std::uint64_t, std::uint32_t> age_of(const T& subject) {
  return {subject.restart, subject.generation};
}

}  // namespace

bool knows_key(const RankIdentity& self, const protocol::Hello& hello) {
  return same(hello.proof, prove_hello(self.key, {}, hello));
}

HandshakeVerdict judge(const RankIdentity& self, const protocol::Challenge& challenge, const protocol::Hello& hello,
                       bool taken, bool complete) {
  HandshakeVerdict judgement;
  protocol::HandshakeReply& reply = judgement.reply;
  const std::string subject = "rank " + std::to_string(hello.rank);
  judgement.proven = same(hello.proof, prove_hello(self.key, challenge, hello));
  reply.verdict = protocol::Verdict::refused;
  if (!judgement.proven) {
    reply.text = subject + " has a different TESSERA_TOKEN than rank 0";
  } else if (age_of(hello) > age_of(self)) {
    reply.verdict = protocol::Verdict::try_again;
    reply.text = subject + " belongs to " + start_of(hello) + ", but rank 0 at this address to " + start_of(self);
  } else if (hello.run != self.run || age_of(hello) != age_of(self)) {
    reply.text = subject + " belongs to " + start_of(hello) + ", rank 0 to " + start_of(self) +
                 "; it remains from another start, or TESSERA_RUN_ID differs";
  } else if (hello.tls != tls_kind(self.tls.get())) {
    reply.text = subject + " has " + describe_tls(hello.tls) + ", rank 0 " + describe_tls(tls_kind(self.tls.get())) +
                 "; set it alike on all ranks";
    judgement.fatal = hello.tls != 2 && tls_kind(self.tls.get()) != 2;  // with certificates the key may be known to all
  } else if (complete) {
    reply.text = "the world of " + std::to_string(self.size) + " ranks is already complete; " + subject + " can't join";
  } else if (hello.size != static_cast<std::uint32_t>(self.size)) {
    reply.text = subject + " was started as one of " + std::to_string(hello.size) + " ranks, rank 0 as one of " +
                 std::to_string(self.size);
    judgement.fatal = true;
  } else if (hello.rank >= hello.size) {
    reply.text = subject + " is outside the ranks 0 to " + std::to_string(self.size - 1);
  } else if (hello.rank == 0 || taken) {
    reply.text = "two processes are rank " + std::to_string(hello.rank) + " in run '" + self.run + "'";
  } else {
    reply.verdict = protocol::Verdict::welcome;
  }
  if (judgement.proven) reply.proof = prove_reply(self.key, challenge, hello, reply);
  return judgement;
}

Seal seal_of(const Digest& key, const protocol::Challenge& challenge, const protocol::Hello& hello, bool first) {
  return {prove(key, "link" + protocol::encode(challenge) + protocol::encode(hello)), first};
}

namespace {

/// The messages on a new connection so far.
struct Talk {
  std::optional<protocol::Challenge> challenge;
  protocol::Hello hello;
  std::optional<protocol::HandshakeReply> reply;
  std::string tls_error;
};

Talk talk(Connection& connection, const RankIdentity& self, const Digest& instance, Deadline deadline) {
  Talk said;
  protocol::Hello& hello = said.hello;
  hello.rank = static_cast<std::uint32_t>(self.rank);
  hello.size = static_cast<std::uint32_t>(self.size);
  hello.restart = self.restart;
  hello.generation = self.generation;
  hello.run = self.run;
  hello.instance = instance;
  hello.tls = static_cast<std::uint8_t>(tls_kind(self.tls.get()));
  const bool encrypts = hello.tls != 0 && !own_address(connection.fd()).empty();
  const auto send_hello = [&](const protocol::Challenge& challenge) {
    hello.nonce = random_digest();
    hello.proof = prove_hello(self.key, challenge, hello);
    connection.send_frame(protocol::encode(hello), deadline, protocol::Type::hello);
  };
  const auto receive_challenge = [&] {
    said.challenge = protocol::decode_challenge(
        connection.receive_frame(deadline, protocol::Type::challenge, protocol::kMaxHandshake));
    return said.challenge && said.challenge->version == protocol::kVersion;
  };
  try {
    if (!encrypts) send_hello({});
    if (!receive_challenge()) return said;
    if (encrypts) {
      const bool alike = said.challenge->tls == hello.tls;
      if (alike) connection.start_tls(*self.tls, tls_secret(self.key), deadline);
      send_hello({});
      if (alike && !receive_challenge()) return said;
    }
    send_hello(*said.challenge);
    said.reply =
        protocol::decode_reply(connection.receive_frame(deadline, protocol::Type::reply, protocol::kMaxHandshake));
  } catch (const Error&) {  // the peer is gone, is late, or sent an invalid message
    said.tls_error = connection.tls_error();
  }
  return said;
}

}  // namespace

Attempt client_handshake(Connection& connection, const RankIdentity& self, const Digest& instance,
                         const std::string& place, Deadline deadline) {
  deadline = std::min(deadline, steady_clock::now() + kAttemptTime);
  const auto [challenge, hello, reply, tls_error] = talk(connection, self, instance, deadline);
  Attempt attempt;
  if (!tls_error.empty() && !reply) {
    attempt.unproven = true;
    attempt.why = self.tls->has_certificates() ? tls_error : tls_error + "; use the same TESSERA_TOKEN on all ranks";
  } else if (!challenge) {
    attempt.why = "the process that listens there is not rank 0 of this library";
  } else if (challenge->version != protocol::kVersion) {
    attempt.unproven = true;
    attempt.why = "it speaks version " + std::to_string(challenge->version) + " of the protocol, rank " +
                  std::to_string(self.rank) + " version " + std::to_string(protocol::kVersion) +
                  "; start all ranks with one version of the library";
  } else if (!reply) {
    attempt.why = "rank 0 closed the connection";
  } else if (!same(reply->proof, prove_reply(self.key, *challenge, hello, *reply))) {
    attempt.unproven = true;
    attempt.why = "authentication failed; use the same TESSERA_TOKEN on all ranks";
  } else if (reply->verdict == protocol::Verdict::refused) {
    throw InvalidUsage("init: rank 0 at " + place + " refuses rank " + std::to_string(self.rank) + ": " +
                       printable(reply->text));
  } else if (reply->verdict == protocol::Verdict::try_again) {
    attempt.why = printable(reply->text);
  } else {
    attempt.admitted = connection.send_byte(deadline);
    attempt.why = "rank 0 closed the connection";
    attempt.session = challenge->session;
    connection.seal(seal_of(self.key, *challenge, hello, false));
  }
  return attempt;
}

Digest tls_secret(const Digest& key) { return prove(key, "tessera tls"); }

Digest world_token(const RankIdentity& self, const Digest& session) {
  return prove(self.key, "world" + to_hex(session) + std::to_string(self.restart) + "/" +
                             std::to_string(self.generation) + "/" + self.run);
}

}  // namespace tessera::comm
