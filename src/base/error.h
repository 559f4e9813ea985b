// The typed errors. Library code throws these (or logs); it never prints, exits or aborts.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// Base of all. what() is one line that says what is wrong, with the values, and what to do.
class TESSERA_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
  /// "Timeout", "PeerLost", ...: for logs, and for sending an error's kind to another rank.
  virtual std::string_view kind() const noexcept = 0;
};

/// The caller's mistake: an argument, an option, a file, an environment variable. Nothing was changed.
class TESSERA_API InvalidUsage : public Error {
 public:
  using Error::Error;
  ~InvalidUsage() override;
  std::string_view kind() const noexcept override { return "InvalidUsage"; }
};

/// Correctly asked, but this backend or build can't do it.
class TESSERA_API Unsupported : public Error {
 public:
  using Error::Error;
  ~Unsupported() override;
  std::string_view kind() const noexcept override { return "Unsupported"; }
};

/// The ranks called different things. Fatal to the communicator.
class TESSERA_API Mismatch : public Error {
 public:
  using Error::Error;
  ~Mismatch() override;
  std::string_view kind() const noexcept override { return "Mismatch"; }
};

/// A deadline passed; names the operation, its number and the ranks waited for. Fatal to the communicator.
class TESSERA_API Timeout : public Error {
 public:
  using Error::Error;
  ~Timeout() override;
  std::string_view kind() const noexcept override { return "Timeout"; }
};

/// A rank died. Fatal to the communicator.
class TESSERA_API PeerLost : public Error {
 public:
  using Error::Error;
  ~PeerLost() override;
  std::string_view kind() const noexcept override { return "PeerLost"; }
};

/// Somebody called abort(); carries who and why. Fatal to the communicator.
class TESSERA_API Aborted : public Error {
 public:
  using Error::Error;
  ~Aborted() override;
  std::string_view kind() const noexcept override { return "Aborted"; }
};

/// A vendor library failed, or what came over the network is not what was sent.
class TESSERA_API BackendError : public Error {
 public:
  using Error::Error;
  ~BackendError() override;
  std::string_view kind() const noexcept override { return "BackendError"; }
};

/// The operating system refused; what() holds the call and errno's text.
class TESSERA_API SystemError : public Error {
 public:
  using Error::Error;
  ~SystemError() override;
  std::string_view kind() const noexcept override { return "SystemError"; }
};

/// SystemError "WHAT: strerror(code)"; code defaults to errno.
TESSERA_API SystemError system_error(std::string_view what, int code = -1);

}  // namespace tessera::base
