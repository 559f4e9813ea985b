// Ranks that are threads of one process.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

class ThreadBootstrap;

/// One bootstrap for each of `ranks` threads. abandon() on any of them makes the exchanges of all throw Aborted.
TESSERA_API std::vector<std::shared_ptr<ThreadBootstrap>> make_thread_bootstraps(int ranks,
                                                                                 std::chrono::milliseconds timeout);

class TESSERA_API ThreadBootstrap final : public Bootstrap {
 public:
  class Hub;
  ThreadBootstrap(std::shared_ptr<Hub> hub, int rank);
  int rank() const noexcept override { return rank_; }
  int size() const noexcept override;
  bool in_process() const noexcept override { return true; }
  std::vector<std::string> all_gather(std::string_view blob) override;
  std::vector<std::shared_ptr<void>> all_gather_objects(std::shared_ptr<void> object) override;
  std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) override;
  const std::vector<std::string>& hosts() const noexcept override { return hosts_; }
  const Token& token() const noexcept override;
  std::string local_address() const override { return "127.0.0.1"; }
  void abandon() noexcept;

 private:
  const std::shared_ptr<Hub> hub_;
  const int rank_;
  const std::vector<std::string> hosts_;
};

}  // namespace tessera::comm
