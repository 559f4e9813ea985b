#include "tessera/fsdp/model.h"

#include <cxxabi.h>

#include <charconv>
#include <cmath>
#include <cstdlib>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/fsdp/training_task.h"

namespace tessera::fsdp {

ModelTensor::~ModelTensor() = default;
Module::~Module() = default;
Runtime::~Runtime() = default;
Model::~Model() = default;

void Model::checkpoint_activations() {
  throw Unsupported("this model's library can't recompute activations here; models of tessera::nn and libtorch can");
}

std::string class_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> whole(abi::__cxa_demangle(type.name(), nullptr, nullptr, &status),
                                                     &std::free);
  const std::string name = status == 0 ? whole.get() : type.name();
  const std::size_t colon = name.rfind(':');
  return colon == std::string::npos ? name : name.substr(colon + 1);
}

std::vector<Module*> Module::modules() { return base::modules_of(*this); }

std::vector<std::shared_ptr<Parameter>> Module::parameters() const {
  return base::parameters_of(base::modules_of(*this));
}

std::vector<std::shared_ptr<ModuleBuffer>> Module::buffers() const {
  std::vector<std::shared_ptr<ModuleBuffer>> all = own_buffers_;
  for (const auto& child : children_)
    for (auto& buffer : child->buffers()) all.push_back(std::move(buffer));
  return all;
}

Module& Module::find(std::string_view path) { return base::module_at(*this, path); }

TrainingTask::~TrainingTask() = default;

double TrainingTask::evaluation_loss(ElementRange /*samples*/) { refuse_evaluation(); }

void TrainingTask::refuse_evaluation() { throw Unsupported("this task has no evaluation; leave --eval out"); }

TaskOptions::TaskOptions(std::map<std::string, std::string> values) : values_(std::move(values)) {}

std::string TaskOptions::text(const std::string& name, const std::string& missing) const {
  read_.insert(name);
  const auto found = values_.find(name);
  return found == values_.end() ? missing : found->second;
}

std::int64_t TaskOptions::integer(const std::string& name, std::int64_t missing, std::int64_t least,
                                  std::int64_t most) const {
  return base::parse_integer(text(name, std::to_string(missing)), "option " + name, least, most);
}

double TaskOptions::number(const std::string& name, double missing) const {
  const std::string given = text(name);
  if (!values_.contains(name)) return missing;
  double value = 0;
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
  if (error != std::errc() || end != given.data() + given.size() || !std::isfinite(value))
    throw InvalidUsage("option " + name + ": '" + given + "' is not a finite number");
  return value;
}

void TaskOptions::refuse_unknown(const std::string& task) const {
  for (const auto& [name, value] : values_) {
    if (read_.contains(name)) continue;
    std::string known;
    for (const std::string& one : read_) known += (known.empty() ? "" : ", ") + one;
    throw InvalidUsage(task + " has no option '" + name + "'; it has " + (known.empty() ? "none" : known));
  }
}

}  // namespace tessera::fsdp
