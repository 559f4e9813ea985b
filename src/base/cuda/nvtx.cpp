#include "tessera/base/cuda/nvtx.h"

#include <exception>
#include <string>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace tessera::base::cuda {
namespace {

/// Null if no profiler is attached, which is determined at the first call.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("tessera");
  return made;
}

void push(const char* name) noexcept {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &attributes);
}

}  // namespace

void begin_range(std::string_view what, std::string_view unit) noexcept {
  if (domain() == nullptr) return;
  try {
    push(std::string(what).append(" ").append(unit).c_str());
  } catch (const std::exception&) {
    push("?");  // no memory for a name; the range is ended all the same
  }
}

void end_range() noexcept {
  if (domain() != nullptr) nvtxDomainRangePop(domain());
}

}  // namespace tessera::base::cuda

#else  // a toolkit without these headers

namespace tessera::base::cuda {
void begin_range(std::string_view, std::string_view) noexcept {}
void end_range() noexcept {}
}  // namespace tessera::base::cuda

#endif
