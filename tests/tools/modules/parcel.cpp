// A backend whose ranks must be started by its own program, `parcelrun`; the operations are those of the default
// backend.
#include "tessera/comm/plugin.h"

namespace {

using namespace tessera::comm;

const Backend& backend() {
  static const std::string_view kLaunch[] = {"parcelrun", "-n", "{ranks}"};
  static const Backend kBackend{
      .name = "parcel",
      .devices = "cpu",
      .probe = [] { return std::string(); },
      .create = [](std::shared_ptr<Bootstrap> bootstrap,
                   const BackendOptions& options) { return find_backend("shm").create(std::move(bootstrap), options); },
      .variables = {},
      .launch_prefix = kLaunch};
  return kBackend;
}

}  // namespace

TESSERA_PLUGIN(backend)
