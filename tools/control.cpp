#include "tools/control.h"

#include <algorithm>
#include <cstring>

#include "tessera/nn/host_access.h"

namespace tessera::tools {

void exchange(nn::Context& context, comm::Communicator& control, comm::ConstView in, comm::View out,
              const Exchange& run) {
  const std::vector<comm::MemoryKind>& kinds = control.capabilities().memory;
  if (std::find(kinds.begin(), kinds.end(), comm::MemoryKind::host) == kinds.end())
    return exchange_through_device(context, in, out, run);
  run(in, out).wait();
}

void exchange_through_device(nn::Context& context, comm::ConstView in, comm::View out, const Exchange& run) {
  const base::Buffer from = context.memory().allocate(in.bytes(), base::MemoryUse::communication);
  const base::Buffer to = context.memory().allocate(out.bytes(), base::MemoryUse::communication);
  nn::upload(context, from.data(), in.bytes(), [&](void* room) { std::memcpy(room, in.data, in.bytes()); });
  context.stream().synchronize();
  run({from.data(), in.count, in.dtype, context.device()}, {to.data(), out.count, out.dtype, context.device()}).wait();
  nn::download(context, to.data(), out.bytes(), [&](const void* came) { std::memcpy(out.data, came, out.bytes()); });
}

}  // namespace tessera::tools
