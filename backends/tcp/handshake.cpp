#include "backends/tcp/handshake.h"

#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/asio/write.hpp>

#include "tessera/comm/bootstrap/hmac.h"

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

Digest proof_of(const char* side, const Bootstrap::Token& token, const Digest& challenge, const Reply& reply) {
  return prove(token, "tessera tcp " + std::string(side) + " " + to_hex(challenge) + to_hex(reply.nonce) + " " +
                          std::to_string(reply.link.from) + " " + std::to_string(reply.link.to) + " " +
                          std::to_string(reply.link.stream));
}

template <class T>
asio::awaitable<bool> send(Socket& socket, const T& value) {
  Failure failure;
  co_await asio::async_write(socket, asio::buffer(&value, sizeof(value)),
                             asio::redirect_error(asio::use_awaitable, failure));
  co_return !failure;
}

template <class T>
asio::awaitable<bool> receive(Socket& socket, T& value) {
  Failure failure;
  co_await asio::async_read(socket, asio::buffer(&value, sizeof(value)),
                            asio::redirect_error(asio::use_awaitable, failure));
  co_return !failure;
}

}  // namespace

asio::awaitable<std::optional<ConnectionId>> welcome(Socket& socket, const Bootstrap::Token& token) {
  Challenge challenge;
  challenge.nonce = random_digest();
  if (!co_await send(socket, challenge)) co_return std::nullopt;
  Reply reply;
  if (!co_await receive(socket, reply) || reply.magic != kMagic) co_return std::nullopt;
  if (!same(reply.proof, proof_of("from", token, challenge.nonce, reply))) co_return std::nullopt;
  const Digest proof = proof_of("to", token, challenge.nonce, reply);
  std::uint8_t believed = 0;
  if (!co_await send(socket, proof) || !co_await receive(socket, believed)) co_return std::nullopt;
  co_return reply.link;
}

asio::awaitable<std::string> introduce(Socket& socket, const Bootstrap::Token& token, ConnectionId link) {
  Challenge challenge;
  if (!co_await receive(socket, challenge)) co_return "it did not answer";
  if (challenge.magic != kMagic) co_return "the process that listens there is not a rank of this version";
  Reply reply;
  reply.link = link;
  reply.nonce = random_digest();
  reply.proof = proof_of("from", token, challenge.nonce, reply);
  Digest proof;
  if (!co_await send(socket, reply) || !co_await receive(socket, proof)) co_return "it did not accept this rank";
  if (!same(proof, proof_of("to", token, challenge.nonce, reply)))
    co_return "the process that listens there is not of this world";
  // If either proof was damaged, the connecting side retries; so the accepting side waits for this byte of any value.
  if (!co_await send(socket, std::uint8_t{1})) co_return "it closed the connection";
  co_return "";
}

}  // namespace tessera::comm::tcp
