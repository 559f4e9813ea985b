#include "tessera/base/device/module_loader.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::base {
namespace {

namespace fs = std::filesystem;

fs::path device_directory() { return fs::path(module_directory()) / "devices"; }

/// The name without its number: "cuda:1" is a device of the module "cuda".
std::string kind_of(Device device) {
  std::string name = name_of(device);
  return name.substr(0, name.find(':'));
}

DeviceInfo state_of_module(const std::string& name, const std::string& path) {
  DeviceInfo state{.name = name, .available = false, .reason = {}, .devices = {}};
  try {
    DeviceProbe probe = load_device_module(path)->probe();
    state.available = probe.problem.empty();
    state.reason = std::move(probe.problem);
    state.devices = std::move(probe.devices);
    state.libraries = std::move(probe.libraries);
  } catch (const Error& error) {
    state.reason = error.what();
  }
  return state;
}

using Header = ElfW(Ehdr);
using Segment = ElfW(Phdr);

bool read_at(int fd, void* to, std::size_t bytes, std::uint64_t offset) {
  return ::pread(fd, to, bytes, static_cast<off_t>(offset)) == static_cast<ssize_t>(bytes);
}

/// The end of the last byte that the headers refer to.
std::uint64_t end_of(const Header& header, const std::vector<Segment>& segments) {
  std::uint64_t end = header.e_shoff == 0 ? 0 : header.e_shoff + std::uint64_t{header.e_shentsize} * header.e_shnum;
  for (const Segment& segment : segments)
    end = std::max<std::uint64_t>(end, segment.p_offset + std::uint64_t{segment.p_filesz});
  return end;
}

/// Why dlopen() can't open the file, or "": it is not a regular file, not an ELF file, or truncated. dlopen() blocks on
/// a FIFO, and maps a truncated file as if it were whole: reading the missing part raises SIGBUS.
std::string shared_object_problem(const std::string& path) {
  const OpenedFile file = open_regular(path);
  if (!file.fd) return file.problem;
  Header header = {};
  if (!read_at(file.fd.get(), &header, sizeof(header), 0) || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return "not a shared object";
  std::vector<Segment> segments(header.e_phentsize == sizeof(Segment) ? header.e_phnum : 0);
  const bool whole = read_at(file.fd.get(), segments.data(), segments.size() * sizeof(Segment), header.e_phoff) &&
                     end_of(header, segments) <= file.bytes;
  return whole ? "" : "truncated at " + std::to_string(file.bytes) + " bytes; copy or build it again";
}

}  // namespace

std::string module_directory() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&module_directory), &info) == 0 || info.dli_fname == nullptr) return "";
  std::error_code error;
  const fs::path library = fs::canonical(info.dli_fname, error);
  return error ? "" : (library.parent_path() / "tessera-modules").string();
}

void* module_entry(const std::string& path, const ModuleDescriptor& table) {
  // dlopen() itself records what is loaded. RTLD_NOW reports a missing vendor function at load time instead of in the
  // middle of a run.
  if (const std::string problem = shared_object_problem(path); !problem.empty())
    throw InvalidUsage(path + ": " + problem);
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const text = ::dlerror();
    throw InvalidUsage(text != nullptr ? text : path + ": can't be loaded");
  }
  void* const entry = ::dlsym(handle, (table.name + "_entry").c_str());
  if (entry == nullptr) throw InvalidUsage(path + ": not a " + table.kind + ": it has no " + table.name + "_entry()");
  return entry;
}

void check_module(const std::string& path, const ModuleDescriptor& table, const char* abi, const std::size_t* size) {
  if (abi == nullptr) throw InvalidUsage(path + ": " + table.name + "_entry() returned null");
  if (std::strcmp(abi, table.abi) != 0)
    throw InvalidUsage(path + ": built for '" + abi + "', but this library is '" + table.abi +
                       "'; rebuild it with this library's headers and compiler");
  if (*size != table.size)
    throw InvalidUsage(path + ": " + table.name + " has " + std::to_string(*size) + " bytes, but this library's has " +
                       std::to_string(table.size) + "; rebuild it with this library's headers");
}

const tessera_device* load_device_module(const std::string& path) {
  const auto* const module =
      open_module<tessera_device>(path, {"tessera_device", "device module", TESSERA_ABI, sizeof(tessera_device)});
  const std::string name = fs::path(path).stem().string();
  if (module->name != name)
    throw InvalidUsage(path + ": its device is called '" + std::string(module->name) + "'; rename the file to " +
                       std::string(module->name) + ".so");
  return module;
}

namespace {

std::string reason_of(const DeviceNotBuilt& missing) { return "not built: " + std::string(missing.reason); }

bool has_module(Device device) { return device.type != DeviceType::cpu && device.type != DeviceType::meta; }

const tessera_device* usable_module(Device device) {
  const std::string kind = kind_of(device);
  const fs::path path = device_directory() / (kind + ".so");
  std::error_code ignore;
  if (!fs::exists(path, ignore)) {
    std::string found = "there is no " + path.string();
    for (const DeviceNotBuilt& missing : devices_not_built())
      if (missing.name == kind) found += "; " + reason_of(missing);
    throw InvalidUsage("device " + kind + ": not part of this build (" + found + ")");
  }
  const tessera_device* const module = load_device_module(path.string());
  const DeviceProbe probe = module->probe();
  if (!probe.problem.empty()) throw InvalidUsage("device " + kind + " can't be used: " + probe.problem);
  if (device.index < 0 || static_cast<std::size_t>(device.index) >= probe.devices.size())
    throw InvalidUsage("device " + name_of(device) + ": no such device; this host has " +
                       std::to_string(probe.devices.size()));
  return module;
}

}  // namespace

void require_device(Device device) {
  if (has_module(device)) usable_module(device);
}

std::shared_ptr<DeviceRuntime> open_device(Device device) {
  if (device.type == DeviceType::cpu) return cpu_runtime();
  if (device.type == DeviceType::meta) return meta_runtime();
  OpenedDevice opened = usable_module(device)->open(device.index);
  if (opened.error != nullptr) std::rethrow_exception(opened.error);
  return std::move(opened.runtime);
}

std::vector<DeviceInfo> list_devices() {
  std::vector<DeviceInfo> states = {
      {.name = "cpu", .available = true, .reason = "", .devices = {cpu_runtime()->properties()}},
      {.name = "meta", .available = true, .reason = "", .devices = {}},
  };
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(device_directory(), error), end; !error && entry != end; entry.increment(error))
    if (entry->path().extension() == ".so") files.push_back(entry->path());
  std::ranges::sort(files);
  for (const fs::path& file : files) states.push_back(state_of_module(file.stem().string(), file.string()));
  for (const DeviceNotBuilt& missing : devices_not_built())
    if (std::ranges::none_of(files, [&](const fs::path& file) { return file.stem() == missing.name; }))
      states.push_back(
          {.name = std::string(missing.name), .available = false, .reason = reason_of(missing), .devices = {}});
  return states;
}

}  // namespace tessera::base
