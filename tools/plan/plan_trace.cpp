#include "tools/plan/plan_trace.h"

#include <sstream>
#include <vector>

#include "tessera/base/trace.h"

namespace tessera::tools {
namespace {

/// The axis along which these ranks are, "world" if it is none. Ranks count along the innermost axis first.
std::string axis_of(const comm::sim::RankSet& members, const fsdp::MeshShape& mesh) {
  int stride = 1;
  for (auto axis = mesh.axes.rbegin(); axis != mesh.axes.rend(); stride *= axis->size, ++axis)
    if (axis->size == members.ranks && stride == members.stride) return axis->name;
  return "world";
}

}  // namespace

std::vector<base::TransferEvent> transfer_events(const StepPlan& plan) {
  const int rank = plan.mesh.size() - 1;  // the simulated one
  std::vector<base::TransferEvent> transfers;
  for (const comm::sim::TransferRecord& transfer : plan.transfers)
    transfers.push_back({.operation = std::string(name_of(transfer.operation.kind)),
                         .axis = axis_of(transfer.operation.members, plan.mesh),
                         .rank = rank,
                         .bytes = transfer.operation.bytes_sent,
                         .called_ns = transfer.called_ns,
                         .begun_ns = transfer.begun_ns,
                         .done_ns = transfer.done_ns});
  return transfers;
}

std::string trace_text(const StepPlan& plan) {
  std::ostringstream text;
  base::write_chrome_trace(text, plan.events, transfer_events(plan));
  return text.str();
}

}  // namespace tessera::tools
