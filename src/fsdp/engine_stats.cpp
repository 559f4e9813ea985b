#include "tessera/fsdp/engine_stats.h"

#include "tessera/fsdp/engine/engine_core.h"

namespace tessera::fsdp {
namespace {

using TrafficCount = comm::TrafficStats::TrafficCount;

void add(TrafficCount& sum, const TrafficCount& more) {
  sum.calls += more.calls;
  sum.bytes_sent += more.bytes_sent;
}

TrafficCount difference(const TrafficCount& a, const TrafficCount& b) {
  return {a.calls - b.calls, a.bytes_sent - b.bytes_sent};
}

TrafficCount total(const comm::TrafficStats& stats) { return {stats.calls(), stats.bytes_sent()}; }

}  // namespace

EngineTraffic EngineTraffic::operator-(const EngineTraffic& earlier) const {
  return {difference(all_gather, earlier.all_gather), difference(reduce_scatter, earlier.reduce_scatter),
          difference(all_reduce, earlier.all_reduce), difference(control, earlier.control),
          difference(broadcast, earlier.broadcast)};
}

std::vector<UnitStats> EngineStats::units() const {
  std::vector<UnitStats> all;
  for (const auto& unit : core_.units) {
    const ParamGroup& group = unit->group;
    all.push_back({group.name(), group.elements(), group.padding(), group.kept_after_forward(), group.spec().is_root,
                   unit->strategy, group.peak_bytes()});
  }
  return all;
}

std::vector<UnitSize> EngineStats::unit_sizes() const {
  std::vector<UnitSize> sizes;
  for (const auto& unit : core_.units) {
    UnitSize& size = sizes.emplace_back();
    size.kept_after_forward = unit->group.kept_after_forward();
    size.is_root = unit->group.spec().is_root;
    for (const FlatParameter& flat : unit->group.flats())
      add_flat(size, flat.layout, core_.model.root().dtype(), core_.options.reduce_dtype);
  }
  return sizes;
}

/// A plug-in may implement a collective by operations of other kinds, so traffic is attributed by communicator. Where
/// units differ in what they do over an axis, reductions of the other kind are counted as what they are.
EngineTraffic EngineStats::traffic() const {
  EngineTraffic traffic;
  for (const auto& [axis, channels] : core_.resources.mesh.all_channels()) {
    bool scatters = false;
    for (const ReduceStage& stage : core_.units.front()->plan().reductions)
      if (stage.axis == axis) scatters = stage.scatter;
    const comm::TrafficStats reduce = channels.reduce->traffic();
    const TrafficCount other = reduce.of(scatters ? comm::OpKind::all_reduce : comm::OpKind::reduce_scatter);
    add(scatters ? traffic.all_reduce : traffic.reduce_scatter, other);
    add(scatters ? traffic.reduce_scatter : traffic.all_reduce, difference(total(reduce), other));
    add(traffic.all_gather, total(channels.gather->traffic()));
    add(traffic.control, total(channels.control->traffic()));
  }
  add(traffic.control, total(core_.order->host().communicator().traffic()));
  traffic.broadcast = core_.buffers->traffic();
  return traffic;
}

std::uint64_t EngineStats::control_formula_bytes() const {
  return (core_.norm ? core_.norm->formula_bytes() : 0) + core_.order->formula_bytes();
}

std::uint64_t EngineStats::buffer_formula_bytes() const { return core_.buffers->formula_bytes(core_.options.buffers); }

std::uint64_t EngineStats::copied_bytes() const { return core_.resources.copier.copied_bytes(); }

OffloadBytes EngineStats::offload_bytes() const {
  return {core_.resources.copier.uploaded_bytes(), core_.resources.copier.downloaded_bytes()};
}

CollectiveStats EngineStats::collective_stats(comm::OpKind collective) const {
  return core_.resources.collectives.stats(collective);
}

}  // namespace tessera::fsdp
