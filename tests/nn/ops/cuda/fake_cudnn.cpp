#include "tests/nn/ops/cuda/fake_cudnn.h"

#include <cstring>
#include <map>
#include <memory>

#include "tests/nn/ops/cuda/fake_cudnn_run.h"

namespace tessera::nn::test {
namespace {

FakeDescriptor& of(cudnnBackendDescriptor_t handle) { return *static_cast<FakeDescriptor*>(handle); }

std::size_t bytes_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
      return 8;
    default:
      return 4;  // enumerations
  }
}

cudnnStatus_t create(cudnnHandle_t* handle) {
  ++fake_cudnn().opened;
  *handle = reinterpret_cast<cudnnHandle_t>(&fake_cudnn());
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy(cudnnHandle_t) { return CUDNN_STATUS_SUCCESS; }
cudnnStatus_t set_stream(cudnnHandle_t, cudaStream_t) { return CUDNN_STATUS_SUCCESS; }
const char* error_string(cudnnStatus_t) { return "a fake's error"; }
void last_error(char* text, std::size_t bytes) { std::strncpy(text, "a fake's reason\nmore", bytes); }
std::size_t version() { return fake_cudnn().version; }

cudnnStatus_t create_descriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* descriptor) {
  *descriptor = new FakeDescriptor{type, false, {}};
  ++fake_cudnn().live;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t destroy_descriptor(cudnnBackendDescriptor_t descriptor) {
  delete &of(descriptor);
  --fake_cudnn().live;
  return CUDNN_STATUS_SUCCESS;
}

/// As in the library: a finalized descriptor doesn't change, and one that is used is finalized.
cudnnStatus_t set_attribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t type, std::int64_t count, const void* values) {
  if (of(descriptor).is_final) return CUDNN_STATUS_NOT_INITIALIZED;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
    for (std::int64_t i = 0; i < count; ++i)
      if (!of(static_cast<const cudnnBackendDescriptor_t*>(values)[i]).is_final) return CUDNN_STATUS_BAD_PARAM;
  const auto* begin = static_cast<const std::byte*>(values);
  of(descriptor).values[name].assign(begin, begin + static_cast<std::size_t>(count) * bytes_of(type));
  return CUDNN_STATUS_SUCCESS;
}

const FakeEngine& engine_of(const FakeDescriptor& descriptor) {
  return fake_cudnn().engines.at(static_cast<std::size_t>(descriptor.integer(CUDNN_ATTR_ENGINE_GLOBAL_INDEX)));
}

cudnnStatus_t finalize(cudnnBackendDescriptor_t handle) {
  FakeDescriptor& made = of(handle);
  if (made.type == CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR && fake_cudnn().rejects_graphs)
    return CUDNN_STATUS_NOT_SUPPORTED;
  if (made.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) {
    if (!engine_of(made.other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG)).can_plan) return CUDNN_STATUS_NOT_SUPPORTED;
    ++fake_cudnn().plans;
  }
  made.is_final = true;
  return CUDNN_STATUS_SUCCESS;
}

/// A configuration and its engine hold the number of the engine among the proposals, and the graph.
void fill(FakeDescriptor& config, std::size_t number, FakeDescriptor& graph) {
  const auto index = static_cast<std::int64_t>(number);
  config.store(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, index);
  config.store(CUDNN_ATTR_ENGINE_OPERATION_GRAPH, static_cast<cudnnBackendDescriptor_t>(&graph));
  config.is_final = true;
}

cudnnStatus_t get_attribute(const cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                            cudnnBackendAttributeType_t, std::int64_t count, std::int64_t* found, void* values) {
  FakeDescriptor& from = of(handle);
  const auto descriptors = static_cast<cudnnBackendDescriptor_t*>(values);
  if (!from.is_final) return CUDNN_STATUS_NOT_INITIALIZED;
  *found = 1;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      *found = static_cast<std::int64_t>(fake_cudnn().engines.size());
      for (std::int64_t i = 0; i < std::min(count, *found); ++i)
        fill(of(descriptors[i]), static_cast<std::size_t>(i), from.other(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH));
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      fill(of(descriptors[0]), static_cast<std::size_t>(from.integer(CUDNN_ATTR_ENGINE_GLOBAL_INDEX)),
           from.other(CUDNN_ATTR_ENGINE_OPERATION_GRAPH));
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE:
      *found = engine_of(from).is_deterministic ? 0 : 1;
      if (*found != 0) *static_cast<cudnnBackendNumericalNote_t*>(values) = CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_GLOBAL_INDEX:
      *static_cast<std::int64_t*>(values) = engine_of(from).index;
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *static_cast<std::int64_t*>(values) = fake_cudnn().workspace;
      return CUDNN_STATUS_SUCCESS;
    default:
      return CUDNN_STATUS_BAD_PARAM;
  }
}

cudnnStatus_t execute(cudnnHandle_t, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack) {
  if (fake_cudnn().fails_to_run || !of(plan).is_final || !of(pack).is_final) return CUDNN_STATUS_EXECUTION_FAILED;
  // The library may write all of its workspace.
  auto* const workspace = of(pack).value<std::byte*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
  std::memset(workspace, 0xFF, static_cast<std::size_t>(fake_cudnn().workspace));
  const FakeDescriptor& config = of(plan).other(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
  if (run_fake_graph(config.other(CUDNN_ATTR_ENGINE_OPERATION_GRAPH), of(pack))) ++fake_cudnn().sums_in_memory;
  ++fake_cudnn().runs;
  fake_cudnn().chosen.push_back(engine_of(config).index);
  return CUDNN_STATUS_SUCCESS;
}

}  // namespace

FakeCudnn& fake_cudnn() {
  static FakeCudnn fake;
  return fake;
}

const cuda::Cudnn& fake_cudnn_api() {
  static const cuda::Cudnn api{.cudnnBackendCreateDescriptor = create_descriptor,
                               .cudnnBackendDestroyDescriptor = destroy_descriptor,
                               .cudnnBackendExecute = execute,
                               .cudnnBackendFinalize = finalize,
                               .cudnnBackendGetAttribute = get_attribute,
                               .cudnnBackendSetAttribute = set_attribute,
                               .cudnnCreate = create,
                               .cudnnDestroy = destroy,
                               .cudnnGetErrorString = error_string,
                               .cudnnGetLastErrorString = last_error,
                               .cudnnGetVersion = version,
                               .cudnnSetStream = set_stream};
  return api;
}

}  // namespace tessera::nn::test
