// Prints the schedules that docs/algorithms.py draws, one JSON object per line: an algorithm, then its steps.
#include <iostream>
#include <string>

#include "tessera/comm/schedule.h"

namespace {

using namespace tessera::comm;

constexpr std::size_t kShare = 1024;  // elements per rank
constexpr std::size_t kSegmentsOfAChain = 3;

void print_steps(const Schedule& schedule, int rank) {
  static constexpr const char* kKinds[] = {"send", "receive", "copy", "reduce"};
  for (std::size_t i = 0; i < schedule.steps.size(); ++i) {
    const ScheduleStep& step = schedule.steps[i];
    std::cout << R"({"rank": )" << rank << R"(, "step": )" << i << R"(, "kind": ")"
              << kKinds[static_cast<std::size_t>(step.kind)] << R"(", "peer": )" << step.peer << R"(, "number": )"
              << step.number << R"(, "bytes": )" << (step.kind == ScheduleStep::Kind::send ? step.from : step.to).bytes
              << R"(, "followers": [)";
    for (std::uint32_t f = 0; f < step.dependents; ++f)
      std::cout << (f == 0 ? "" : ", ") << schedule.dependents[step.first_dependent + f];
    std::cout << "]}\n";
  }
}

bool ordered(const CollectiveSpec& spec, DType dtype, std::string_view name) {
  CollectiveSpec request = spec;
  request.ordered = true;
  request.dtype = dtype;
  return refusal(request, name).empty();
}

void print(OpKind kind, const std::string& name, int ranks) {
  CollectiveSpec spec{.kind = kind, .ranks = ranks, .ordered = false};
  if (kind != OpKind::barrier) spec.count = kShare * static_cast<std::size_t>(ranks);
  if (name == "pipelined") spec.count = kSegmentsOfAChain * 65536;
  CollectiveSpec unequal = spec;
  unequal.in_starts = {0};
  std::cout << R"({"algorithm": ")" << name_of(kind) << '=' << name << R"(", "ranks": )" << ranks << R"(, "bytes": )"
            << spec.count * size_of(spec.dtype) << R"(, "ordered": )" << ordered(spec, DType::f32, name)
            << R"(, "ordered_16": )" << ordered(spec, DType::bf16, name) << R"(, "unequal": )"
            << refusal(unequal, name).empty() << "}\n";
  for (spec.rank = 0; spec.rank < ranks; ++spec.rank) print_steps(build_schedule(spec, name), spec.rank);
}

}  // namespace

int main() {
  for (const std::string& text : known_algorithms(false)) {
    const std::size_t separator = text.find('=');
    for (const int ranks : {4, 6, 8})
      print(parse_op_kind(text.substr(0, separator)), text.substr(separator + 1), ranks);
  }
}
