#include "tessera/nn/kernels/cuda/matmul_choices.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>

#include "tessera/base/atomic_file.h"
#include "tessera/base/checksum.h"
#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"

namespace tessera::nn::cuda {
namespace {

using base::InvalidUsage;
using nlohmann::json;

constexpr std::string_view kTry = "try:";

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw InvalidUsage("TESSERA_MATMUL: " + path + " " + why + "; write it with TESSERA_MATMUL=try:FILE and one rank");
}

}  // namespace

MatmulChoices::MatmulChoices(std::string_view setting, std::string device, std::size_t version)
    : device_(std::move(device)), version_(version), tries_(setting.starts_with(kTry)) {
  path_ = setting.substr(tries_ ? kTry.size() : 0);
  if (tries_ && path_.empty()) throw InvalidUsage("TESSERA_MATMUL=try: has no file; give try:FILE");
  if (path_.empty()) return;
  if (!tries_ || std::filesystem::exists(path_))
    read();
  else
    write();  // a path that can't be written is an error before the trials
}

std::string MatmulChoices::name() const {
  if (path_.empty()) return "";
  base::RunningChecksum all;
  for (const auto& [key, choice] : choices_) {
    all.add(std::as_bytes(std::span(key)));
    all.add(std::as_bytes(std::span(choice.algorithm)));
  }
  std::ostringstream text;
  text << " with choices " << std::hex << all.value();
  return text.str();
}

const MatmulChoices::Choice* MatmulChoices::find(const Key& key) const {
  const auto found = choices_.find(key);
  return found == choices_.end() ? nullptr : &found->second;
}

void MatmulChoices::add(const Key& key, const Choice& choice) {
  choices_[key] = choice;
  write();
}

void MatmulChoices::read() {
  const base::FileText read = base::read_regular(path_);
  if (!read.problem.empty()) refuse(path_, "can't be read");
  std::string device;
  std::size_t version = 0;
  try {
    const json all = base::parse_json<json>(read.text, "it");
    device = all.at("device").get<std::string>();
    version = all.at("cublaslt").get<std::size_t>();
    for (const json& one : all.at("products"))
      choices_[one.at("product").get<Key>()] = {one.at("algorithm").get<Algorithm>(), one.at("us").get<double>(),
                                                one.at("first_us").get<double>()};
  } catch (const std::exception& e) {  // nlohmann's, or that it is no JSON
    refuse(path_, std::string("has no algorithms of cuBLASLt (") + e.what() + ")");
  }
  if (device != device_ || version != version_)
    refuse(path_, "is for cuBLASLt " + std::to_string(version) + " on " + device + ", not for " +
                      std::to_string(version_) + " on " + device_);
}

void MatmulChoices::write() const {
  json products = json::array();
  for (const auto& [key, choice] : choices_)
    products.push_back(
        {{"product", key}, {"algorithm", choice.algorithm}, {"us", choice.us}, {"first_us", choice.first_us}});
  const json all = {{"device", device_}, {"cublaslt", version_}, {"products", std::move(products)}};
  base::write_file_atomically(path_, all.dump(1) + "\n");
}

}  // namespace tessera::nn::cuda
