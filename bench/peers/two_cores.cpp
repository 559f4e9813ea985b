// What one core pays to write memory that another one has read: whether they have a cache in common decides. Two
// threads on two cores pass a flag to and fro, then hand over 1 MiB, written with plain or with streaming stores.
// Medians.
//
//   c++ -O2 -std=c++20 -pthread two_cores.cpp -o two_cores && ./two_cores [CORE CORE]
//
// x86-64 only, for its streaming stores.
#include <emmintrin.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kBytes = std::size_t{1} << 20;
constexpr int kTurns = 20000, kRounds = 61;
constexpr std::chrono::seconds kPatience{10};  // for a thread that gets no core

alignas(4096) char shared[kBytes], source[kBytes], target[kBytes];
alignas(128) std::atomic<int> flag{0};

void bind_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0) return;
  std::fprintf(stderr, "two_cores: can't run on core %d; pass two cores of this machine\n", core);
  std::exit(2);
}

void wait_for(int value) {
  const auto until = Clock::now() + kPatience;
  for (unsigned i = 1; flag.load(std::memory_order_acquire) != value; ++i)
    if (i % 65536 == 0 && Clock::now() > until) {
      std::fprintf(stderr, "two_cores: the other thread has not come within 10 s\n");
      std::exit(1);
    }
}

template <class Work>
double microseconds(const Work& work) {
  const auto begin = Clock::now();
  work();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void write_streaming() {
  for (std::size_t i = 0; i < kBytes; i += sizeof(__m128i))
    _mm_stream_si128(reinterpret_cast<__m128i*>(shared + i), *reinterpret_cast<const __m128i*>(source + i));
  _mm_sfence();
}

/// Times of the writer and of the reader, both with plain and with streaming stores.
std::vector<double> writes[2], reads[2];

void read_all() {
  for (int turn = 0; turn < kTurns; ++turn) {
    wait_for(2 * turn + 1);
    flag.store(2 * turn + 2, std::memory_order_release);
  }
  for (int i = 0; i < 2 * kRounds; ++i) {
    wait_for(-2 * i - 1);
    reads[i / kRounds].push_back(microseconds([] {
      std::memcpy(target, shared, kBytes);
      asm volatile("" : : "r"(target) : "memory");  // the copy is used
    }));
    flag.store(-2 * i - 2, std::memory_order_release);
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int first = count > 2 ? std::atoi(arguments[1]) : 0, second = count > 2 ? std::atoi(arguments[2]) : 1;
  std::thread reader([second] {
    bind_to(second);
    read_all();
  });
  bind_to(first);
  std::memset(source, 1, kBytes);
  const double turns = microseconds([] {
    for (int turn = 0; turn < kTurns; ++turn) {
      flag.store(2 * turn + 1, std::memory_order_release);
      wait_for(2 * turn + 2);
    }
  });
  for (int i = 0; i < 2 * kRounds; ++i) {
    writes[i / kRounds].push_back(microseconds([i] {
      if (i < kRounds)
        std::memcpy(shared, source, kBytes);
      else
        write_streaming();
    }));
    flag.store(-2 * i - 1, std::memory_order_release);
    wait_for(-2 * i - 2);
  }
  reader.join();
  std::printf(
      "from core to core %.0f ns; 1 MiB: plain stores %.0f us, read %.0f us; streaming stores %.0f us, read %.0f us\n",
      turns / kTurns / 2 * 1000, median(writes[0]), median(reads[0]), median(writes[1]), median(reads[1]));
}
