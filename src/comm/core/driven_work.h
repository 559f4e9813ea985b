// An operation driven by a progress engine and by the threads that wait for it.
#pragma once

#include <atomic>
#include <cstdint>

#include "tessera/base/export.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/work.h"

namespace tessera::comm {

class TESSERA_API DrivenWork : public WorkState {
 public:
  static constexpr std::uint32_t kGood = 1;
  static constexpr std::uint32_t kFailed = 2;

  bool done() noexcept final;
  bool wait_until(Clock::time_point until) final;
  void wait() final;
  bool succeeded() const noexcept { return finished.load() == kGood; }

  std::atomic<std::uint32_t> finished{0};  ///< kGood or kFailed; 0: in flight

 protected:
  ~DrivenWork() override;
  virtual ProgressEngine& engine() const noexcept = 0;
  [[noreturn]] virtual void throw_failure() const = 0;
};

}  // namespace tessera::comm
