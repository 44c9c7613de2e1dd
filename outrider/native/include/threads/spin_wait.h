// Waiting for another thread: spin while the core is otherwise idle, then sleep.
//
// A thread with a dedicated core spins, because wake-up latency delays the whole barrier. Next to busy processes it sleeps: a
// thread that keeps spinning or yielding uses up its time slice before the other threads arrive, is preempted at that moment,
// and delays them in turn. With as many spinning processes as cores, steps took up to tens of times as long.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "processor.h"

namespace outrider {

inline std::atomic<int> sleepers{0};  // sleeping threads of this library

// Wake all threads that sleep on `place`, after it changed.
template <class T>
void notify(const std::atomic<T>& place) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // either this thread sees the sleeper, or the sleeper the change
  if (sleepers.load() > 0) syscall(SYS_futex, &place, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Sleeps until the 32-bit `place` differs from `value`. The thread that changes it must call `notify`.
template <class T>
void sleep_while(const std::atomic<T>& place, T value) {
  static_assert(sizeof(place) == 4 && std::atomic<T>::is_always_lock_free, "a futex is a 32-bit word");
  while (place.load(std::memory_order_acquire) == value) {
    sleepers.fetch_add(1);
    syscall(SYS_futex, &place, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
  }
}

// Spins until `place` differs from `value` and returns true; returns false after `iterations`. idle(): called in each
// iteration, for a little other work
template <class T, class Idle>
bool spin_while(const std::atomic<T>& place, T value, int iterations, Idle&& idle) {
  for (; iterations > 0; --iterations) {
    if (place.load(std::memory_order_acquire) != value) return true;
    idle();
    spin_hint();
  }
  return false;
}

// Yields the core. Returns false if another thread took it for a while.
inline bool core_is_idle() {
  using Clock = std::chrono::steady_clock;
  const auto before = Clock::now();
  sched_yield();
  return Clock::now() - before < std::chrono::microseconds(200);
}

// As `sleep_while`, for short waits: spins for some milliseconds first, as long as no other thread wants the core.
template <class T, class Idle>
void wait_while(const std::atomic<T>& place, T value, Idle&& idle) {
  constexpr int kSpins = 4000, kYields = 50;  // iterations between yields, some tens of microseconds; yields
  for (int yields = 0; yields < kYields; ++yields) {
    if (spin_while(place, value, kSpins, idle)) return;
    if (!core_is_idle()) break;
  }
  sleep_while(place, value);
}
template <class T>
void wait_while(const std::atomic<T>& place, T value) {
  wait_while(place, value, [] {});
}

}  // namespace outrider
