#include "tessera/comm/control/handshake.h"

#include <utility>

namespace tessera::comm {
namespace {

using std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kAttemptTime = 5s;  // until rank 0 must have answered one connection

/// Both sides prove over all that was said; the first word keeps one's proof from being sent back as the other's.
Digest prove_hello(const Digest& key, const wire::Challenge& challenge, wire::Hello hello) {
  hello.proof = {};
  return prove(key, "hello" + wire::encode(challenge) + wire::encode(hello));
}

Digest prove_answer(const Digest& key, const wire::Challenge& challenge, const wire::Hello& hello,
                    wire::Answer answer) {
  answer.proof = {};
  return prove(key, "answer" + wire::encode(challenge) + wire::encode(hello) + wire::encode(answer));
}

/// Of a hello or an identity.
template <class T>
std::string start_of(const T& who) {
  const auto part = [](const char* name, std::uint64_t number) {
    return number > 0 ? std::string(", ") + name + " " + std::to_string(number) : "";
  };
  return "run '" + who.run + "'" + part("restart", who.restart) + part("generation", who.generation);
}

/// Counts up from one start of a run to the next, and within one from world to world.
template <class T>
std::pair<std::uint64_t, std::uint32_t> age_of(const T& who) {
  return {who.restart, who.generation};
}

}  // namespace

Judgement judge(const Identity& self, const wire::Challenge& challenge, const wire::Hello& hello, bool taken,
                bool complete) {
  Judgement judgement;
  wire::Answer& answer = judgement.answer;
  const std::string who = "rank " + std::to_string(hello.rank);
  judgement.proven = same(hello.proof, prove_hello(self.key, challenge, hello));
  answer.verdict = wire::Verdict::refused;
  if (!judgement.proven) {
    answer.text = who + " has another TESSERA_TOKEN than rank 0";
  } else if (age_of(hello) > age_of(self)) {
    answer.verdict = wire::Verdict::try_again;
    answer.text = who + " belongs to " + start_of(hello) + ", but the rank 0 that answers to " + start_of(self);
  } else if (hello.run != self.run || age_of(hello) != age_of(self)) {
    answer.text = who + " belongs to " + start_of(hello) + ", rank 0 to " + start_of(self) +
                  ": it is left from another start, or TESSERA_RUN_ID differs";
  } else if (complete) {
    answer.text = "the world of " + std::to_string(self.size) + " ranks is complete; " + who + " comes too late";
  } else if (hello.size != static_cast<std::uint32_t>(self.size)) {
    answer.text = who + " was started as one of " + std::to_string(hello.size) + " ranks, rank 0 as one of " +
                  std::to_string(self.size);
    judgement.fatal = true;
  } else if (hello.rank == 0 || hello.rank >= hello.size || taken) {
    answer.text = "there are two ranks " + std::to_string(hello.rank) + " in run '" + self.run + "'";
  } else {
    answer.verdict = wire::Verdict::welcome;
  }
  if (judgement.proven) answer.proof = prove_answer(self.key, challenge, hello, answer);
  return judgement;
}

std::optional<Admission> ask_for_admission(Connection& connection, const Identity& self, const std::string& place,
                                           Deadline deadline, std::string& why) {
  deadline = std::min(deadline, steady_clock::now() + kAttemptTime);
  wire::Hello hello;
  hello.rank = static_cast<std::uint32_t>(self.rank);
  hello.size = static_cast<std::uint32_t>(self.size);
  hello.restart = self.restart;
  hello.generation = self.generation;
  hello.run = self.run;
  std::optional<wire::Challenge> challenge;
  std::optional<wire::Answer> answer;
  try {
    challenge =
        wire::decode_challenge(connection.receive_frame(deadline, wire::Type::challenge, wire::kLongestHandshake));
    if (!challenge) throw SystemError("init: no challenge");
    if (challenge->version == wire::kVersion) {
      hello.nonce = random_digest();
      hello.proof = prove_hello(self.key, *challenge, hello);
      connection.send_frame(wire::encode(hello), deadline, wire::Type::hello);
      answer = wire::decode_answer(connection.receive_frame(deadline, wire::Type::answer, wire::kLongestHandshake));
    }
  } catch (const Error&) {
    why = challenge ? "rank 0 closed the connection" : "what answers there is no rank 0 of this library";
    return std::nullopt;
  }
  if (challenge->version != wire::kVersion)
    throw InvalidUsage("init: rank 0 at " + place + " speaks version " + std::to_string(challenge->version) +
                       " of the protocol, rank " + std::to_string(self.rank) + " version " +
                       std::to_string(wire::kVersion) + ": start all ranks with one version of the library");
  if (answer && answer->verdict == wire::Verdict::refused)
    throw InvalidUsage("init: rank 0 at " + place + " refuses rank " + std::to_string(self.rank) + ": " + answer->text);
  if (!answer || !same(answer->proof, prove_answer(self.key, *challenge, hello, *answer))) {
    why = "who answers there does not know the token";
    return std::nullopt;
  }
  if (answer->verdict == wire::Verdict::try_again) {
    why = answer->text;
    return std::nullopt;
  }
  return Admission{challenge->session};
}

Digest world_token(const Identity& self, const Digest& session) {
  return prove(self.key, "world" + to_hex(session) + std::to_string(self.restart) + "/" +
                             std::to_string(self.generation) + "/" + self.run);
}

}  // namespace tessera::comm
