#include "backends/tcp/handshake.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <span>

namespace tessera::comm::tcp {
namespace {

namespace asio = boost::asio;
using Failure = boost::system::error_code;

constexpr std::uint32_t kMagic = 0x32485354;  // "TSH2": format and version

struct Challenge {
  std::uint32_t magic = kMagic;
  Digest nonce;
};

struct Reply {
  std::uint32_t magic = kMagic;
  ConnectionId link;
  Digest nonce;
  Digest proof;
};

/// Binds a use of the token to this handshake: `what` tells the uses apart.
std::string context(const std::string& what, const Digest& challenge, const Reply& reply) {
  return "tessera tcp " + what + " " + to_hex(challenge) + to_hex(reply.nonce) + " " + std::to_string(reply.link.from) +
         " " + std::to_string(reply.link.to) + " " + std::to_string(reply.link.stream);
}

Digest proof_of(const char* side, const Bootstrap::Token& token, const Digest& challenge, const Reply& reply) {
  return prove(token, context(side, challenge, reply));
}

/// HKDF-Expand (RFC 5869, section 2.3) for one block of output. The token is a uniformly random key already, so that
/// HKDF-Extract is not needed (section 3.3).
Digest key_of(const char* sender, const Bootstrap::Token& token, const Digest& challenge, const Reply& reply) {
  return prove(token, context(std::string("data ") + sender, challenge, reply) + '\x01');
}

using State = SecureStream::State;

/// Waits until the stream can continue. False: it can't.
asio::awaitable<bool> ready(Socket& socket, State state) {
  if (!SecureStream::must_wait(state)) co_return false;
  Failure failure;
  co_await socket.async_wait(state == State::wants_read ? Socket::wait_read : Socket::wait_write,
                             asio::redirect_error(asio::use_awaitable, failure));
  co_return !failure;
}

asio::awaitable<bool> start_session(Socket& socket, SecureStream& stream) {
  State state = stream.handshake();
  while (state != State::done && co_await ready(socket, state)) state = stream.handshake();
  co_return state == State::done;
}

/// Moves all bytes of `value` by `move`, which moves some.
template <class Span, class Move>
asio::awaitable<bool> move_all(Socket& socket, Span bytes, Move move) {
  while (!bytes.empty()) {
    const SecureStream::Moved moved = move(bytes);
    bytes = bytes.subspan(moved.bytes);
    if (moved.state != State::done && !co_await ready(socket, moved.state)) co_return false;
  }
  co_return true;
}

template <class T>
asio::awaitable<bool> send(Socket& socket, SecureStream& stream, T value) {
  co_return co_await move_all(socket, std::as_bytes(std::span(&value, 1)),
                              [&](std::span<const std::byte> bytes) { return stream.write({bytes}); });
}

template <class T>
asio::awaitable<bool> receive(Socket& socket, SecureStream& stream, T& value) {
  co_return co_await move_all(socket, std::as_writable_bytes(std::span(&value, 1)),
                              [&](std::span<std::byte> bytes) { return stream.read({bytes}); });
}

}  // namespace

asio::awaitable<std::optional<Introduction>> welcome(Socket& socket, SecureStream& stream,
                                                     const Bootstrap::Token& token, const Admission& admits) {
  if (!co_await start_session(socket, stream)) co_return std::nullopt;
  Challenge challenge;
  challenge.nonce = random_digest();
  if (!co_await send(socket, stream, challenge)) co_return std::nullopt;
  Reply reply;
  if (!co_await receive(socket, stream, reply) || reply.magic != kMagic) co_return std::nullopt;
  if (!same(reply.proof, proof_of("from", token, challenge.nonce, reply)) || !admits(reply.link))
    co_return std::nullopt;
  const Digest proof = proof_of("to", token, challenge.nonce, reply);
  std::uint8_t believed = 0;
  if (!co_await send(socket, stream, proof) || !co_await receive(socket, stream, believed)) co_return std::nullopt;
  co_return Introduction{reply.link,
                         {key_of("to", token, challenge.nonce, reply), key_of("from", token, challenge.nonce, reply)}};
}

asio::awaitable<std::string> introduce(Socket& socket, SecureStream& stream, const Bootstrap::Token& token,
                                       Introduction& own) {
  if (!co_await start_session(socket, stream))
    co_return stream.tls_error().empty() ? "it did not begin a TLS session" : stream.tls_error();
  Challenge challenge;
  if (!co_await receive(socket, stream, challenge)) co_return "it did not answer";
  if (challenge.magic != kMagic) co_return "the process that listens there is not a rank of this version";
  Reply reply;
  reply.link = own.link;
  reply.nonce = random_digest();
  reply.proof = proof_of("from", token, challenge.nonce, reply);
  Digest proof;
  if (!co_await send(socket, stream, reply) || !co_await receive(socket, stream, proof))
    co_return "it did not accept this rank";
  if (!same(proof, proof_of("to", token, challenge.nonce, reply)))
    co_return "the process that listens there is not of this world";
  // If either proof was damaged, the connecting side retries; so the accepting side waits for this byte of any value.
  if (!co_await send(socket, stream, std::uint8_t{1})) co_return "it closed the connection";
  own.keys = {key_of("from", token, challenge.nonce, reply), key_of("to", token, challenge.nonce, reply)};
  co_return "";
}

}  // namespace tessera::comm::tcp
