// TLS 1.3 between the ranks of a world.
#pragma once

#include <memory>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

struct ssl_ctx_st;

namespace tessera::comm {

/// What all TLS sessions of a rank have in common. The ends of a session authenticate each other by a secret that both
/// know, or by certificates.
class TESSERA_API TlsContext {
 public:
  /// PEM files; all empty: a secret.
  struct Files {
    std::string certificate;  ///< TESSERA_TLS_CERT: this rank's, then those that lead to the authority's
    std::string key;          ///< TESSERA_TLS_KEY: its private key
    std::string authorities;  ///< TESSERA_TLS_CA: whose certificates are accepted
  };
  /// Throws InvalidUsage that names the variable and the file, SystemError.
  explicit TlsContext(const Files& files);

  bool has_certificates() const noexcept { return certificates_; }
  ssl_ctx_st* get() const noexcept { return context_.get(); }

 private:
  struct Free {
    void operator()(ssl_ctx_st* context) const noexcept;
  };
  std::unique_ptr<ssl_ctx_st, Free> context_;
  const bool certificates_;
};

/// By TESSERA_TLS and its files; null: TLS is off. Throws as the constructor.
std::shared_ptr<const TlsContext> tls_from_environment();

/// "TESSERA_TLS=0", "TESSERA_TLS=1 with the token", "... with certificates", by kind: see tls_kind().
std::string describe_tls(unsigned kind);
/// How this rank's connections are protected, as ranks tell each other: 0 without TLS, else by a secret or
/// certificates.
unsigned tls_kind(const TlsContext* tls);

}  // namespace tessera::comm
