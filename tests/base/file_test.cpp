#include "tessera/base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tessera/base/checksum.h"
#include "tessera/base/text.h"

namespace tessera::base {
namespace {

namespace fs = std::filesystem;

class File : public testing::Test {
 protected:
  void SetUp() override { fs::create_directory(directory_); }
  void TearDown() override { fs::remove_all(directory_); }
  const fs::path directory_ = fs::temp_directory_path() / ("file-test-" + std::to_string(::getpid()));
  const fs::path path_ = directory_ / "file";
};

/// If a standard stream is closed, the next descriptor has its number, and what a program prints would go there.
TEST_F(File, DescriptorIsNeverAStandardStream) {
  const UniqueFd saved(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 10));
  ::close(STDIN_FILENO);
  std::ofstream(path_) << "text";  // uses and closes it
  {
    const int lowest = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    EXPECT_EQ(lowest, STDIN_FILENO);  // the control
    const UniqueFd moved(lowest);
    EXPECT_GT(moved.get(), STDERR_FILENO);
    EXPECT_TRUE(::fcntl(moved.get(), F_GETFD) & FD_CLOEXEC);
    EXPECT_EQ(::fcntl(STDIN_FILENO, F_GETFD), -1);
    EXPECT_EQ(read_regular(path_).text, "text");
  }
  open_closed_streams();
  EXPECT_EQ(fs::read_symlink("/proc/self/fd/0"), "/dev/null");
  if (saved) ::dup2(saved.get(), STDIN_FILENO);
}

TEST_F(File, IsReadUnchanged) {
  const std::string text = "one\ntwo" + std::string(200'000, '\1') + "three";
  std::ofstream(path_) << text;
  const OpenedFile file = open_regular(path_);
  EXPECT_TRUE(file.fd);
  EXPECT_EQ(file.bytes, text.size());
  EXPECT_EQ(file.problem, "");
  EXPECT_TRUE(::fcntl(file.fd.get(), F_GETFD) & FD_CLOEXEC);
  const FileText read = read_regular(path_);
  EXPECT_EQ(read.text, text);
  EXPECT_EQ(read.problem, "");
}

TEST_F(File, LongerThanTheLimitIsNotRead) {
  std::ofstream(path_) << std::string(1000, 'x');
  EXPECT_EQ(read_regular(path_, 1000).problem, "");
  const FileText read = read_regular(path_, 999);
  EXPECT_EQ(read.problem, "more than 999 bytes, too many for such a file");
  EXPECT_EQ(read.text, "");
  EXPECT_NE(read_regular("/proc/self/maps", 10).problem, "");  // which has no size
  EXPECT_EQ(read_regular("/proc/self/maps").problem, "");      // the control
  EXPECT_EQ(read_regular("/dev/zero").problem, "not a regular file");
}

TEST_F(File, LinksAreFollowedOnlyWhereAllowed) {
  std::ofstream(path_) << "text";
  const fs::path link = directory_ / "link";
  fs::create_symlink(path_, link);
  EXPECT_EQ(read_regular(link).text, "text");  // the control
  EXPECT_EQ(read_regular(link, 100, O_NOFOLLOW).problem, "a symbolic link");
  const OpenedFile refused = open_regular(link, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  EXPECT_FALSE(refused.fd);
  EXPECT_EQ(read_regular(path_).text, "text");
  EXPECT_TRUE(open_regular(directory_ / "new", O_WRONLY | O_CREAT | O_NOFOLLOW).fd);
}

TEST_F(File, NewFilesDoNotReplaceOthers) {
  std::ofstream(path_) << "text";
  const std::string taken = path_.string() + ".new-" + std::to_string(::getpid()) + "-0";
  fs::create_symlink(path_, taken);
  fs::create_symlink(directory_ / "nowhere", path_.string() + ".new-" + std::to_string(::getpid()) + "-1");
  const NewFile file = create_beside(path_, ".new-", O_WRONLY);
  ASSERT_TRUE(file.fd);
  EXPECT_EQ(file.path, path_.string() + ".new-" + std::to_string(::getpid()) + "-2");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(file.path)));
  EXPECT_EQ(read_regular(path_).text, "text");
  EXPECT_FALSE(fs::exists(directory_ / "nowhere"));
  EXPECT_EQ(create_beside(directory_ / "none" / "x", ".new-", O_WRONLY).code, ENOENT);
}

/// Parsers would take it for the end.
TEST_F(File, TextHasNoZeroByte) {
  std::ofstream(path_) << std::string("one\0two", 7);
  EXPECT_EQ(read_regular(path_).problem, "not a text file: byte 3 is zero");
}

TEST_F(File, RejectsOtherThanRegularFilesWithoutBlocking) {
  EXPECT_EQ(open_regular(path_).problem, "No such file or directory");
  EXPECT_EQ(open_regular(path_).code, ENOENT);
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  for (const fs::path& none : {path_, directory_, fs::path("/dev/null")}) {
    EXPECT_EQ(open_regular(none).problem, "not a regular file");
    EXPECT_EQ(open_regular(none).code, 0);
    EXPECT_EQ(read_regular(none).problem, "not a regular file");
    EXPECT_FALSE(open_regular(none).fd);
  }
  fs::create_symlink("/etc/passwd", directory_ / "link");
  EXPECT_EQ(open_regular(directory_ / "link", O_NOFOLLOW).code, ELOOP);
  EXPECT_TRUE(open_regular(directory_ / "link").fd);
}

TEST_F(File, DescriptorsAreCounted) {
  const std::size_t before = free_descriptors();
  const OpenedFile one = open_regular("/etc/passwd");
  const OpenedFile two = open_regular("/etc/passwd");
  EXPECT_EQ(free_descriptors(), before - 2);
}

TEST_F(File, LimitOfDescriptorsRisesUpToTheHardOne) {
  const auto limit_after = [](std::size_t wanted) {
    rlimit limit{100, 200};
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) ::_exit(255);
    allow_descriptors(wanted);
    const bool enough = free_descriptors() == wanted;
    ::_exit(::getrlimit(RLIMIT_NOFILE, &limit) != 0 ? 254 : enough ? 1 : static_cast<int>(limit.rlim_cur));
  };
  EXPECT_EXIT(limit_after(120), testing::ExitedWithCode(1), "") << "120 are free, and no more";
  EXPECT_EXIT(limit_after(10), testing::ExitedWithCode(100), "") << "enough were free";
  EXPECT_EXIT(limit_after(1000), testing::ExitedWithCode(200), "") << "the hard limit";
}

TEST(Text, KeepsPrintableText) {
  for (const std::string text :
       {"", "plain, with 'marks' \\ and ~", "d\xc3\xa9j\xc3\xa0 vu", "\xe2\x9c\x93", "\xf0\x9f\x9a\x80"})
    EXPECT_EQ(printable(text), text);
}

TEST(Text, EscapesOtherBytes) {
  EXPECT_EQ(printable("a\x1b[31mb\n\t\x7f"), "a\\x1b[31mb\\x0a\\x09\\x7f");
  EXPECT_EQ(printable("a\x1b[31mb\n\t\x7f", "\n"), "a\\x1b[31mb\n\\x09\\x7f");
  EXPECT_EQ(printable(std::string("\0x", 2)), "\\x00x");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J"),
            "\\xc2\\x9b2J");                       // a control character above ASCII
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");  // no UTF-8 at all, and a truncated sequence
  EXPECT_EQ(printable("\xc3(\xe2\x82"), "\\xc3(\\xe2\\x82");
}

TEST(Checksum, IsIndependentOfDivision) {
  std::vector<std::byte> bytes(10'000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7);
  RunningChecksum running;
  for (const std::size_t part : {1UL, 100UL, 8192UL, 10'000UL}) {
    running.reset();
    for (std::size_t at = 0; at < bytes.size(); at += part)
      running.add(std::span(bytes).subspan(at, std::min(part, bytes.size() - at)));
    EXPECT_EQ(running.value(), checksum(bytes));
  }
  const std::uint64_t before = checksum(bytes);
  bytes[5000] ^= std::byte{4};
  EXPECT_NE(checksum(bytes), before);
}

}  // namespace
}  // namespace tessera::base
