// The launcher's report of failures: which rank failed first, its output, its exit code. Ranks are shell scripts.
#include "tools/launch/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::tools {
namespace {

using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;

struct Outcome {
  int code = -1;
  std::string out;
  std::string err;
  double seconds = 0;
};

Outcome run(LaunchSpec plan, const std::string& script) {
  plan.command = {"/bin/sh", "-c", script};
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  outcome.code = launch(plan);
  outcome.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  outcome.out = testing::internal::GetCapturedStdout();
  outcome.err = testing::internal::GetCapturedStderr();
  return outcome;
}

TEST(Launcher, SuccessIsSilent) {
  const Outcome outcome = run({.ranks = 3}, "true");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out + outcome.err, "");
}

TEST(Launcher, HandlerReceivesOutputOfRanks) {
  std::map<int, std::vector<std::string>> lines;
  LaunchSpec plan{.ranks = 3};
  plan.on_output = [&](int rank, std::string_view line) { lines[rank].emplace_back(line); };
  const Outcome outcome = run(plan, "echo rank $TESSERA_RANK of $TESSERA_WORLD_SIZE; printf 'no newline'");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out, "");
  ASSERT_EQ(lines.size(), 3U);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(lines[rank], testing::ElementsAre("rank " + std::to_string(rank) + " of 3", "no newline"));
}

TEST(Launcher, ExtraVariablesCannotReplaceRankVariables) {
  LaunchSpec plan{.ranks = 1, .tag = true};
  plan.environment = {{"TESSERA_TEST_EXTRA", "x y"}};
  EXPECT_EQ(run(plan, "echo $TESSERA_TEST_EXTRA").out, "[0] x y\n");
}

TEST(Launcher, LastLineIsFirstCause) {
  const Outcome outcome = run({.ranks = 3, .own_program = true},
                              "if [ $TESSERA_RANK = 1 ]; then echo 'tessera: disk full' >&2; exit 1; fi;"
                              "sleep 0.3; echo 'tessera: all_reduce: rank 1 was lost' >&2; exit 3");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: rank 1: disk full\n"));
  EXPECT_THAT(outcome.err, HasSubstr("tessera: rank 0: all_reduce: rank 1 was lost\n"));
}

TEST(Launcher, SecondaryFailureIsNoCauseEvenIfItEndsFirst) {
  const char* script =
      "if [ $TESSERA_RANK = 1 ]; then sleep 0.3; echo 'tessera: disk full' >&2; exit 1; fi;"
      "echo 'tessera: aborted by rank 1' >&2; exit ";
  EXPECT_THAT(run({.ranks = 2, .own_program = true}, script + std::string("3")).err,
              EndsWith("tessera: rank 1: disk full\n"));
  // Negative control: without the exit code of a secondary failure, the rank that ended first is named.
  EXPECT_THAT(run({.ranks = 2, .own_program = true}, script + std::string("1")).err,
              EndsWith("rank 0: aborted by rank 1\n"));
}

TEST(Launcher, InvalidUsageIsOneLineAndCode2) {
  const Outcome outcome =
      run({.ranks = 4, .own_program = true}, "echo \"tessera: no file 'x'; give --data\" >&2; exit 2");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err, "tessera: no file 'x'; give --data\n");
}

TEST(Launcher, NotesAndWarningsAreNoErrors) {
  const Outcome outcome = run({.ranks = 1, .own_program = true}, "echo 'tessera: note: auto chose x' >&2; exit 0");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.err, "tessera: note: auto chose x\n");
}

TEST(Launcher, NamesDeadRankWithItsSignal) {
  const Outcome outcome = run({.ranks = 3}, "if [ $TESSERA_RANK = 2 ]; then kill -9 $$; fi; sleep 0.2; exit 1");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: rank 2 was killed by signal 9 (SIGKILL)\n"));
  EXPECT_LT(outcome.seconds, 2) << "all ended by themselves: nothing to wait for";
}

TEST(Launcher, KillsRanksThatIgnoreSignals) {
  LaunchSpec plan{.ranks = 3};
  plan.grace = std::chrono::milliseconds(300);
  plan.kill_after = std::chrono::milliseconds(300);
  const Outcome outcome = run(plan, "if [ $TESSERA_RANK = 0 ]; then exit 7; fi; trap '' TERM; sleep 30; sleep 30");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: rank 0 ended with code 7\n"));
  EXPECT_GE(outcome.seconds, 0.5) << "the others have their time to say something";
  EXPECT_LT(outcome.seconds, 2.5);
}

TEST(Launcher, QuotesLastLineOfUserProgram) {
  const Outcome outcome = run({.ranks = 1, .tag = true}, "echo 'bad input' >&2; exit 1");
  EXPECT_EQ(outcome.err, "[0] bad input\ntessera: rank 0 ended with code 1: bad input\n");
}

/// Ranks under a prefix program that starts them: a script in place of a vendor's launcher.
LaunchSpec under_prefix(int ranks) {
  return {.ranks = ranks, .prefix = {TESSERA_PARCELRUN, "-n", "{ranks}"}, .own_program = true};
}

TEST(LaunchPrefix, SetsRankVariables) {
  std::vector<std::string> lines;
  LaunchSpec plan = under_prefix(3);
  plan.tag = plan.bind_to_cores = true;
  plan.on_output = [&](int rank, std::string_view line) {
    EXPECT_EQ(rank, -1);
    lines.emplace_back(line);
  };
  const Outcome outcome =
      run(plan,
          "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE \"$TESSERA_RANK$TESSERA_WORLD_SIZE\" "
          "${TESSERA_RUN_ID:+known}");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(outcome.out + outcome.err, "");
  EXPECT_THAT(lines, testing::UnorderedElementsAre("0 of 3  known", "1 of 3  known", "2 of 3  known"));
}

TEST(LaunchPrefix, LastLineIsFirstCause) {
  const nn::test::TemporaryDirectory directory;
  const Outcome outcome = run(under_prefix(3), "exec python3 " TESSERA_REPORTING_RANK " " + directory.path("said"));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("\ntessera: disk full\n"));
  EXPECT_THAT(outcome.err, HasSubstr("tessera: all_reduce: rank 1 was lost\n"));
  EXPECT_THAT(outcome.err, HasSubstr("parcelrun noticed"));
}

TEST(LaunchPrefix, RankKilledAfterFailureIsNoCauseForLateLauncher) {
  const nn::test::TemporaryDirectory directory;
  const Outcome outcome = run(under_prefix(2), "exec python3 " TESSERA_LATE_LAUNCHER " " + directory.path("rank-0"));
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("\ntessera: disk full\n"));
}

TEST(LaunchPrefix, NamesKilledRank) {
  const Outcome outcome = run(under_prefix(3), "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then kill -9 $$; fi; sleep 0.3");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err,
              testing::ContainsRegex("tessera: rank 1 (was killed by signal 9 [(]SIGKILL[)]|died without an "
                                     "error message; .*parcelrun ended with code 137)\n$"));
}

TEST(LaunchPrefix, FailureEndsOtherRanks) {
  const Outcome outcome =
      run(under_prefix(3),
          "if [ $OMPI_COMM_WORLD_RANK = 1 ]; then echo 'tessera: disk full' >&2; sleep 0.1; exit 1; fi;"
          "exec sleep 60");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: disk full\n"));
  EXPECT_LT(outcome.seconds, 5);
}

TEST(LaunchPrefix, KillEndsOtherRanks) {
  const Outcome outcome = run(under_prefix(3), "if [ $OMPI_COMM_WORLD_RANK = 2 ]; then kill -9 $$; fi; exec sleep 60");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("tessera: rank 2 "));
  EXPECT_LT(outcome.seconds, 5);
}

TEST(LaunchPrefix, InvalidUsageIsReportedOnceWithCode2) {
  const Outcome outcome = run(under_prefix(3), "echo \"tessera: no file 'x'; give --data\" >&2; sleep 0.1; exit 2");
  EXPECT_EQ(outcome.code, 2);
  EXPECT_EQ(outcome.err, "tessera: no file 'x'; give --data\n");
}

TEST(LaunchPrefix, EndsProcessesThatItLeaves) {
  const Outcome outcome =
      run({.ranks = 2, .prefix = {"/bin/sh", "-c", "sleep 30 & exit 1"}, .own_program = true}, "true");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: /bin/sh ended with code 1\n"));
  EXPECT_LT(outcome.seconds, 2);
}

/// A prefix program that starts rank 2, runs `then` with its process id in $rank, and exits without waiting for it.
LaunchSpec under_hasty_prefix(const std::string& then) {
  return {.ranks = 3,
          .prefix = {"/bin/sh", "-c",
                     "exec >/dev/null 2>&1; OMPI_COMM_WORLD_RANK=2 \"$@\" & rank=$!; sleep 0.2; " + then + " exit 15",
                     "sh"},
          .own_program = true};
}

TEST(LaunchPrefix, NamesRankThatDiesJustAfterItsStarter) {
  const Outcome outcome = run(under_hasty_prefix("(sleep 0.05; kill -9 $rank) &"), "exec sleep 60");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: rank 2 was killed by signal 9 (SIGKILL)\n"));
}

TEST(LaunchPrefix, RankThatTheLauncherEndsIsNoCause) {
  const Outcome outcome = run(under_hasty_prefix(""), "exec sleep 60");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, EndsWith("tessera: /bin/sh ended with code 15\n"));
  EXPECT_LT(outcome.seconds, 5);
}

TEST(LaunchPrefix, MissingPrefixIsInvalidUsage) {
  const LaunchSpec plan{.ranks = 2, .command = {"/bin/true"}, .prefix = {"/no/such/mpirun", "{ranks}"}};
  EXPECT_THROW(launch(plan), base::InvalidUsage);
}

TEST(Launcher, ReportsProgramsThatCannotStart) {
  LaunchSpec plan{.ranks = 2, .command = {"/no/such/program"}};
  EXPECT_THROW(launch(plan), base::InvalidUsage);
  plan.command = {"/etc/passwd"};
  EXPECT_THROW(launch(plan), base::InvalidUsage);
  plan.command = {"/bin/true"};
  plan.log_dir = "/proc/nowhere";
  EXPECT_THROW(launch(plan), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::tools
