#include <link.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tessera/base/file.h"
#include "tessera/base/posix/shared_object.h"

namespace tessera::base {
namespace {

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

}  // namespace

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

}  // namespace tessera::base
