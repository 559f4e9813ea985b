// Typed errors. Library code throws these (or logs); it never prints, exits or aborts.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "tessera/base/export.h"

/// Devices, memory, streams, errors and the environment, which all other layers use.
namespace tessera::base {

/// The base class. what() is one line that states the problem, with the values, and the remedy.
class TESSERA_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
  /// "Timeout", "PeerLost", ...: for logs, and to send an error's kind to another rank.
  virtual std::string_view kind() const noexcept = 0;
};

/// An invalid argument, option, file or environment variable. Nothing was changed.
class TESSERA_API InvalidUsage : public Error {
 public:
  using Error::Error;
  ~InvalidUsage() override;
  std::string_view kind() const noexcept override { return "InvalidUsage"; }
};

/// A valid request that this backend or build doesn't support.
class TESSERA_API Unsupported : public Error {
 public:
  using Error::Error;
  ~Unsupported() override;
  std::string_view kind() const noexcept override { return "Unsupported"; }
};

/// The ranks called different operations. Fatal to the communicator.
class TESSERA_API Mismatch : public Error {
 public:
  using Error::Error;
  ~Mismatch() override;
  std::string_view kind() const noexcept override { return "Mismatch"; }
};

/// A deadline passed; names the operation, its number and the ranks that it waits for. Fatal to the communicator.
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

/// A rank called abort(); names the rank and the reason. Fatal to the communicator.
class TESSERA_API Aborted : public Error {
 public:
  using Error::Error;
  ~Aborted() override;
  std::string_view kind() const noexcept override { return "Aborted"; }
};

/// A vendor library failed, or data received over the network is corrupt.
class TESSERA_API BackendError : public Error {
 public:
  using Error::Error;
  ~BackendError() override;
  std::string_view kind() const noexcept override { return "BackendError"; }
};

/// A system call failed; what() holds the call and errno's text.
class TESSERA_API SystemError : public Error {
 public:
  using Error::Error;
  ~SystemError() override;
  std::string_view kind() const noexcept override { return "SystemError"; }
};

/// Throws the error whose kind() is `kind`; SystemError if there is none.
[[noreturn]] TESSERA_API void throw_error(std::string_view kind, const std::string& text);

/// SystemError "WHAT: strerror(code)"; code defaults to errno.
TESSERA_API SystemError system_error(std::string_view what, int code = -1);

}  // namespace tessera::base
