#include "c10d/errors.h"

#include <c10/util/Exception.h>

#include <string>

#include "tessera/base/error.h"

namespace tessera::c10d_backend {
namespace {

template <class TorchError>
std::exception_ptr made(const std::string& what) {
  return std::make_exception_ptr(TorchError({__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)}, what));
}

}  // namespace

std::exception_ptr as_torch_error(std::exception_ptr error) noexcept {
  if (error == nullptr) return nullptr;
  try {
    std::rethrow_exception(error);
  } catch (const base::InvalidUsage& known) {
    return made<c10::ValueError>(known.what());
  } catch (const base::Unsupported& known) {
    return made<c10::NotImplementedError>(known.what());
  } catch (const base::PeerLost& known) {
    return made<c10::DistNetworkError>(known.what());
  } catch (const base::Timeout& known) {  // in words that programs look for in the errors of other backends
    return made<c10::DistBackendError>(std::string("tessera: Timed out in ") + known.what());
  } catch (const base::Error& known) {
    return made<c10::DistBackendError>(std::string(known.kind()) + ": " + known.what());
  } catch (...) {
    return error;
  }
}

}  // namespace tessera::c10d_backend
