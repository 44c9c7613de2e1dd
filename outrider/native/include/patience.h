// Waiting for another thread: awake as long as that keeps nobody from a core, then asleep.
//
// Who is slow to wake holds up the others, so nobody sleeps who has a core to himself. Beside busy processes it is the other
// way round: who spins or yields all along has used up his time when the others arrive, loses his core just then, and they
// wait in turn. With as many such processes as cores, steps took up to tens of times as long.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

namespace outrider {

inline std::atomic<int> sleepers{0};  // of this library

// Wake all who sleep at a place, which has changed.
template <class T>
void notify(const std::atomic<T>& place) {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // either this sees the sleeper, or the sleeper the change
  if (sleepers.load() > 0) syscall(SYS_futex, &place, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Returns once `place`, of 32 bits, is no longer `value`; whoever changes it calls `notify`.
template <class T>
void sleep_while(const std::atomic<T>& place, T value) {
  static_assert(sizeof(place) == 4 && std::atomic<T>::is_always_lock_free, "what the system can look at");
  while (place.load(std::memory_order_acquire) == value) {
    sleepers.fetch_add(1);
    syscall(SYS_futex, &place, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
    sleepers.fetch_sub(1);
  }
}

// True as soon as `place` is no longer `value`; false after so many turns. idle(): what can be done meanwhile, a little at
// a time
template <class T, class Idle>
bool spin_while(const std::atomic<T>& place, T value, int turns, Idle&& idle) {
  for (; turns > 0; --turns) {
    if (place.load(std::memory_order_acquire) != value) return true;
    idle();
    _mm_pause();
  }
  return false;
}

// False if somebody else had this core for a while, if only it was offered.
inline bool alone() {
  using Clock = std::chrono::steady_clock;
  const auto before = Clock::now();
  sched_yield();
  return Clock::now() - before < std::chrono::microseconds(200);
}

// As `sleep_while`, for one whose turn comes soon: awake for some milliseconds as long as nobody else wants the core.
template <class T, class Idle>
void wait_while(const std::atomic<T>& place, T value, Idle&& idle) {
  constexpr int kSpins = 4000, kOffers = 50;  // turns, some tens of microseconds; offers of the core
  for (int offers = 0; offers < kOffers; ++offers) {
    if (spin_while(place, value, kSpins, idle)) return;
    if (!alone()) break;
  }
  sleep_while(place, value);
}
template <class T>
void wait_while(const std::atomic<T>& place, T value) {
  wait_while(place, value, [] {});
}

}  // namespace outrider
