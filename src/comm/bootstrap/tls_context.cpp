#include "tessera/comm/bootstrap/secure_stream.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/core/env_variables.h"

namespace tessera::comm {
namespace {

constexpr std::uint64_t kMaxFile = 1 << 20;

void require(bool fine) {
  if (!fine) throw SystemError("init: OpenSSL can't set up TLS 1.3");
}

[[noreturn]] void refuse(const EnvVariable& variable, const std::string& path, const std::string& why) {
  ERR_clear_error();
  throw InvalidUsage("init: " + std::string(variable.name) + "=" + path + ": " + why);
}

/// A PEM file in memory: OpenSSL's own functions would wait for a FIFO, and ask for a passphrase on the terminal.
class PemFile {
 public:
  PemFile(const EnvVariable& variable, const std::string& path) : variable_(variable), path_(path) {
    const FileText file = read_regular(path, kMaxFile);
    if (!file.problem.empty()) refuse(variable, path, file.problem);
    text_ = file.text;
    bytes_.reset(BIO_new_mem_buf(text_.data(), static_cast<int>(text_.size())));
    require(bytes_ != nullptr);
  }
  /// Null after the last one.
  std::unique_ptr<X509, decltype(&X509_free)> certificate() {
    return {PEM_read_bio_X509(bytes_.get(), nullptr, no_passphrase, nullptr), X509_free};
  }
  std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key() {
    return {PEM_read_bio_PrivateKey(bytes_.get(), nullptr, no_passphrase, nullptr), EVP_PKEY_free};
  }
  [[noreturn]] void refuse_content(const std::string& why) const { refuse(variable_, path_, why); }

 private:
  static int no_passphrase(char*, int, int, void*) { return -1; }
  struct Free {
    void operator()(BIO* bio) const noexcept { BIO_free(bio); }
  };
  const EnvVariable& variable_;
  const std::string path_;
  std::string text_;
  std::unique_ptr<BIO, Free> bytes_;
};

void use_files(SSL_CTX* context, const TlsContext::Files& files) {
  PemFile chain(env::kTlsCert, files.certificate);
  const auto own = chain.certificate();
  if (own == nullptr) chain.refuse_content("has no certificate in PEM format");
  if (SSL_CTX_use_certificate(context, own.get()) != 1)
    chain.refuse_content("OpenSSL does not accept the certificate (is its key too short?)");
  while (const auto next = chain.certificate()) require(SSL_CTX_add1_chain_cert(context, next.get()) == 1);
  PemFile key_file(env::kTlsKey, files.key);
  const auto key = key_file.key();
  if (key == nullptr) key_file.refuse_content("has no private key in PEM format without a passphrase");
  if (SSL_CTX_use_PrivateKey(context, key.get()) != 1 || SSL_CTX_check_private_key(context) != 1)
    key_file.refuse_content("is not the key of the certificate in TESSERA_TLS_CERT=" + files.certificate);
  PemFile authorities(env::kTlsCa, files.authorities);
  std::size_t count = 0;
  for (; const auto one = authorities.certificate(); ++count)
    require(X509_STORE_add_cert(SSL_CTX_get_cert_store(context), one.get()) == 1);
  if (count == 0) authorities.refuse_content("has no certificate in PEM format");
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  ERR_clear_error();
}

// The secret is the application data of a session (see SecureStream).
unsigned int secret_of(SSL* session, unsigned char* secret, unsigned int room) {
  const auto* const digest = static_cast<const Digest*>(SSL_get_app_data(session));
  if (digest == nullptr || room < digest->size()) return 0;
  std::ranges::copy(*digest, secret);
  return static_cast<unsigned int>(digest->size());
}

unsigned int client_secret(SSL* session, const char*, char* identity, unsigned int identity_room, unsigned char* secret,
                           unsigned int room) {
  constexpr std::string_view kIdentity = "tessera";
  if (identity_room <= kIdentity.size()) return 0;
  identity[kIdentity.copy(identity, kIdentity.size())] = '\0';
  return secret_of(session, secret, room);
}

unsigned int server_secret(SSL* session, const char*, unsigned char* secret, unsigned int room) {
  return secret_of(session, secret, room);
}

}  // namespace

void TlsContext::Free::operator()(ssl_ctx_st* context) const noexcept { SSL_CTX_free(context); }

TlsContext::TlsContext(const Files& files)
    : context_(SSL_CTX_new(TLS_method())), certificates_(!files.certificate.empty()) {
  SSL_CTX* const context = context_.get();
  require(context != nullptr && SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
          SSL_CTX_set_max_proto_version(context, TLS1_3_VERSION) == 1 &&
          SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") == 1);  // the fastest; kernels have it
  SSL_CTX_set_options(context, SSL_OP_ENABLE_KTLS | SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION |
                                   SSL_OP_IGNORE_UNEXPECTED_EOF);  // both protocols have a last message of their own
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_quiet_shutdown(context, 1);
  // On a socket (see SecureStream): one system call for a record instead of two. A larger buffer is slower: OpenSSL
  // moves all that is left in it, to align each record.
  SSL_CTX_set_read_ahead(context, 1);
  require(SSL_CTX_set_num_tickets(context, 0) == 1);
  if (certificates_) {
    use_files(context, files);
  } else {
    SSL_CTX_set_psk_client_callback(context, client_secret);
    SSL_CTX_set_psk_server_callback(context, server_secret);
  }
}

std::shared_ptr<const TlsContext> tls_from_environment() {
  const TlsContext::Files files{env_or_default(env::kTlsCert), env_or_default(env::kTlsKey),
                                env_or_default(env::kTlsCa)};
  const std::optional<std::string> set = read_env(env::kTls);
  const bool any = !files.certificate.empty() || !files.key.empty() || !files.authorities.empty();
  if (!set && any) throw InvalidUsage("init: TESSERA_TLS_CERT, _KEY and _CA need TESSERA_TLS=1; without it TLS is off");
  if (!set || !parse_flag(*set, env::kTls.name)) return nullptr;
  if (any && (files.certificate.empty() || files.key.empty() || files.authorities.empty()))
    throw InvalidUsage(
        "init: set all of TESSERA_TLS_CERT, TESSERA_TLS_KEY and TESSERA_TLS_CA, or none for TLS by the "
        "token");
  return std::make_shared<TlsContext>(files);
}

std::string describe_tls(unsigned kind) {
  if (kind == 0) return "TESSERA_TLS=0";
  return kind == 1 ? "TESSERA_TLS=1 by the token" : "TESSERA_TLS=1 by certificates (TESSERA_TLS_CERT)";
}

unsigned tls_kind(const TlsContext* tls) { return tls == nullptr ? 0 : tls->has_certificates() ? 2 : 1; }

}  // namespace tessera::comm
