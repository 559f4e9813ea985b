#include "tools/plan/chakra.h"

#include <fmt/format.h>
#include <google/protobuf/io/coded_stream.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "et_def.pb.h"
#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/plan/process_groups.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
namespace et = ChakraProtoMsg;
using comm::OpKind;
using nlohmann::ordered_json;

constexpr std::uint64_t kGroupsNode = 1;  // the node that defines the groups; those of the step follow it

et::CollectiveCommType type_of(OpKind kind) {
  switch (kind) {
    case OpKind::all_reduce:
      return et::ALL_REDUCE;
    case OpKind::all_gather:
      return et::ALL_GATHER;
    case OpKind::reduce_scatter:
      return et::REDUCE_SCATTER;
    case OpKind::broadcast:
      return et::BROADCAST;
    case OpKind::reduce:
      return et::REDUCE;
    case OpKind::gather:
      return et::GATHER;
    case OpKind::scatter:
      return et::SCATTER;
    case OpKind::all_to_all:
      return et::ALL_TO_ALL;
    case OpKind::barrier:
      return et::BARRIER;
    default:
      throw base::Unsupported("--chakra: no collective of the schema is " + std::string(name_of(kind)));
  }
}

/// Of the buffer that each rank passes, as readers of the schema expect.
std::uint64_t input_bytes(const comm::sim::SimulatedOp& operation) {
  const bool grows = operation.kind == OpKind::all_gather || operation.kind == OpKind::gather;
  return grows ? operation.bytes / static_cast<std::uint64_t>(operation.ranks) : operation.bytes;
}

et::AttributeProto& attribute(et::Node& node, const char* name) {
  et::AttributeProto* added = node.add_attr();
  added->set_name(name);
  return *added;
}

std::uint64_t microseconds(std::int64_t ns) { return static_cast<std::uint64_t>((ns + 500) / 1000); }

/// The node of the step with this index. The group of an operation is its last attribute, which is still empty.
et::Node node_of(const StepNode& step, std::size_t index) {
  et::Node node;
  node.set_id(kGroupsNode + 1 + index);
  node.set_name(step.label.empty() ? "work" : std::string(step.label));
  node.set_type(step.operation ? et::COMM_COLL_NODE : et::COMP_NODE);
  for (const std::uint32_t earlier : step.after) node.add_data_deps(kGroupsNode + 1 + earlier);
  if (step.after.empty()) node.add_data_deps(kGroupsNode);
  node.set_start_time_micros(microseconds(step.start_ns));
  node.set_duration_micros(microseconds(step.duration_ns));
  attribute(node, "is_cpu_op").set_bool_val(false);
  attribute(node, "start_ns").set_uint64_val(static_cast<std::uint64_t>(step.start_ns));
  attribute(node, "duration_ns").set_uint64_val(static_cast<std::uint64_t>(step.duration_ns));
  if (!step.operation) return node;
  attribute(node, "comm_type").set_int64_val(type_of(step.operation->kind));
  attribute(node, "comm_size").set_int64_val(static_cast<std::int64_t>(input_bytes(*step.operation)));
  attribute(node, "bytes_sent").set_uint64_val(step.operation->bytes_sent);
  attribute(node, "pg_name");
  return node;
}

void append(std::string& file, const google::protobuf::MessageLite& message) {
  google::protobuf::uint8 length[5];
  const auto* end = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
      static_cast<std::uint32_t>(message.ByteSizeLong()), length);
  file.append(reinterpret_cast<const char*>(length), static_cast<std::size_t>(end - length));
  message.AppendToString(&file);
}

/// The groups of one rank, in the form of PyTorch's traces: a list with one string, the groups as JSON.
et::Node groups_node(const std::vector<ProcessGroups::Group>& groups) {
  ordered_json json = ordered_json::array();
  for (const ProcessGroups::Group& group : groups)
    json.push_back({{"pg_name", std::to_string(group.id)},
                    {"group_size", group.members.ranks},
                    {"ranks", ranks_in(group.members)}});
  et::Node node;
  node.set_id(kGroupsNode);
  node.set_name("## process_group:init ##");
  node.set_type(et::METADATA_NODE);
  node.mutable_inputs()->set_values("['" + json_text(json) + "']");
  node.mutable_inputs()->set_shapes("[[]]");
  node.mutable_inputs()->set_types("['String']");
  attribute(node, "is_cpu_op").set_bool_val(false);
  return node;
}

/// The file of any rank. What is the same for all ranks is encoded once.
class RankFile {
 public:
  RankFile(const StepGraph& step, int ranks) : step_(step), groups_(step, ranks) {
    et::GlobalMetadata metadata;
    metadata.set_version("0.0.4");
    append(head_, metadata);
    for (std::size_t i = 0; i < step.size(); ++i) {
      if (step[i].operation)
        operations_.push_back({i, node_of(step[i], i), {}});
      else
        append(operations_.empty() ? work_ : operations_.back().work, node_of(step[i], i));
    }
  }

  void write(int rank, const std::string& path) {
    file_ = head_;
    append(file_, groups_node(groups_.of_rank(rank)));
    file_ += work_;
    for (Operation& operation : operations_) {
      const int group = groups_.of(*step_[operation.index].operation, rank).id;
      et::AttributeProto* name = operation.node.mutable_attr(operation.node.attr_size() - 1);
      name->set_string_val(std::to_string(group));
      append(file_, operation.node);
      file_ += operation.work;
    }
    write_file(path, file_);
  }

  const ProcessGroups& groups() const { return groups_; }

 private:
  struct Operation {
    std::size_t index = 0;  // in the step
    et::Node node;
    std::string work;  // encoded, up to the next operation
  };
  const StepGraph& step_;
  const ProcessGroups groups_;
  std::string head_, work_, file_;
  std::vector<Operation> operations_;
};

}  // namespace

void check_chakra_folder(const std::string& folder) {
  if (folder.empty()) return;
  const auto wrong = [&](const std::string& what) { throw base::InvalidUsage("--chakra '" + folder + "' " + what); };
  std::error_code error;
  if (fs::exists(folder, error) && !fs::is_directory(folder, error)) wrong("is not a folder; name a new one");
  fs::create_directories(folder, error);
  if (error) wrong("can't be created: " + error.message());
  if (::access(folder.c_str(), W_OK | X_OK) != 0) wrong("can't be written; name another folder");
  if (!fs::is_empty(folder, error) || error) wrong("is not empty; name a new folder");
}

void write_chakra(const StepGraph& step, int ranks, const std::string& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw base::SystemError("can't create '" + folder + "': " + error.message());
  RankFile file(step, ranks);
  for (int rank = 0; rank < ranks; ++rank) file.write(rank, fmt::format("{}/rank.{}.et", folder, rank));
  ordered_json groups = ordered_json::object();
  for (const ProcessGroups::Group& group : file.groups().all())
    if (group.id != 0) groups[std::to_string(group.id)] = ranks_in(group.members);
  write_file(folder + "/comm_groups.json", json_text(groups) + "\n");
}

}  // namespace tessera::tools
