// The library's collective plug-ins beside `plain`, by name.
#include "plugins/collectives/compressed.h"
#include "plugins/collectives/powersgd.h"
#include "tessera/fsdp/collective_plugin.h"

namespace tessera::fsdp {

using collectives::CompressedCollective;
using collectives::Compression;
using collectives::CompressionOptions;
using collectives::PowerSgd;
using comm::OpKind;

void add_built_in_collectives(CollectiveRegistry& registry) {
  const auto add_compressed = [&](const char* name, const CompressionOptions& options) {
    registry.add(
        options.collective, name, [options] { return std::make_unique<CompressedCollective>(options); },
        [options](const CollectiveSize& size) { return compressed_cost(options, size); });
  };
  for (const OpKind collective : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce}) {
    add_compressed("bf16", {collective, Compression::bf16});
    add_compressed("int8", {collective, Compression::int8});
    if (collective != OpKind::all_gather) add_compressed("int8_feedback", {collective, Compression::int8, true});
  }
  for (const auto& each : {std::pair("powersgd", 4), std::pair("powersgd1", 1), std::pair("powersgd2", 2),
                           std::pair("powersgd8", 8), std::pair("powersgd16", 16)})
    registry.add(
        OpKind::all_reduce, each.first, [each] { return std::make_unique<PowerSgd>(each.first, each.second); },
        [each](const CollectiveSize& size) { return collectives::powersgd_cost(each.second, size); });
}

}  // namespace tessera::fsdp
