// A pool of threads that run one function together, and the barrier between its phases.
#pragma once

#include <functional>
#include <thread>
#include <vector>

#include "threads/spin_wait.h"

namespace outrider {

// A barrier that spins first, because the wait is a fraction of a microsecond while every thread has a core.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  // idle(): called while spinning, for a little other work
  template <class Idle>
  void wait(Idle&& idle) {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      notify(phase_);
      return;
    }
    wait_while(phase_, phase, idle);
  }
  void wait() {
    wait([] {});
  }

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

// Calls function(i) for each of `count` portions that threads share: thread i starts with portion i, then takes portions from
// the counter. next: portions taken beyond the first `threads`
template <class Function>
void each_portion(std::atomic<int64_t>& next, int thread, int threads, int64_t count, Function&& function) {
  for (int64_t i = thread; i < count; i = threads + next.fetch_add(1, std::memory_order_relaxed)) function(i);
}

// Runs a function on all threads at once; the caller is thread 0.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), barrier_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stopping_ = true;
    begin();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }
  Barrier& barrier() { return barrier_; }

  void run(const std::function<void(int)>& job) {
    if (threads_ == 1) return job(0);
    job_ = &job;
    pending_.store(threads_ - 1, std::memory_order_relaxed);
    begin();
    job(0);
    for (int left; (left = pending_.load(std::memory_order_acquire)) > 0;) wait_while(pending_, left);
  }

 private:
  // Iterations (some tens of microseconds) that a worker spins for the next job before it sleeps: steps follow one another
  // closely, but other processes may need the core meanwhile.
  static constexpr int kLinger = 2000;

  void begin() {
    epoch_.fetch_add(1, std::memory_order_release);
    notify(epoch_);
  }

  void work(int index) {
    for (unsigned seen = 0;;) {
      if (!spin_while(epoch_, seen, kLinger, [] {})) sleep_while(epoch_, seen);
      seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      (*job_)(index);
      if (pending_.fetch_sub(1, std::memory_order_release) == 1) notify(pending_);
    }
  }

  const int threads_;
  Barrier barrier_;
  std::vector<std::thread> workers_;
  const std::function<void(int)>* job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> pending_{0};
};

}  // namespace outrider
