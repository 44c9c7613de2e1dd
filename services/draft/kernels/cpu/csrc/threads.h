// The thread pool of all kernels: as many threads as the process has cores, working for one call at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "threads/spin_wait.h"

namespace outrider {

// Threads that help a caller. Work is taken in small ranges, so the caller never depends on a helper: on a busy machine
// a helper may be scheduled only after the work is done, and is then not waited for.
class ThreadPool {
 public:
  explicit ThreadPool(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~ThreadPool() {
    stopping_ = true;
    begin();
    for (auto& helper : helpers_) helper.join();
  }

  int threads() const { return int(helpers_.size()) + 1; }

  // job() takes ranges until none is left; it runs in the calling thread, and in every helper that wakes in time.
  void run(const std::function<void()>& job) {
    if (helpers_.empty()) return job();
    job_ = &job;
    inside_.store(0, std::memory_order_release);
    begin();
    job();
    inside_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int inside; (inside = inside_.load(std::memory_order_acquire)) != kClosed;) wait_while(inside_, inside);
  }

 private:
  static constexpr int kClosed = 1 << 30;
  // Turns that a helper spins for the next job before it sleeps (some tens of microseconds): kernels follow one another
  // closely, but other processes may need the core.
  static constexpr int kLinger = 2000;

  void begin() {
    epoch_.fetch_add(1, std::memory_order_release);
    notify(epoch_);
  }

  void help() {
    for (unsigned seen = 0;;) {
      if (!spin_while(epoch_, seen, kLinger, [] {})) sleep_while(epoch_, seen);
      seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      int inside = inside_.load(std::memory_order_acquire);
      while (!(inside & kClosed) && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) {
      }
      if (inside & kClosed) continue;
      (*job_)();
      inside_.fetch_sub(1, std::memory_order_release);
      notify(inside_);
    }
  }

  std::vector<std::thread> helpers_;
  const std::function<void()>* job_ = nullptr;
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> inside_{kClosed};  // number of working helpers, and the bit kClosed
};

class SharedPool {
 public:
  static SharedPool& instance() {
    static SharedPool threads;
    return threads;
  }

  void set(int count) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pool_ || pool_->threads() != count) pool_ = std::make_unique<ThreadPool>(count);
  }

  // job(pool). XLA may call independent kernels at the same time; they run one after another.
  template <class Job>
  void with(Job&& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pool_) pool_ = std::make_unique<ThreadPool>(1);
    job(*pool_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> pool_;
};

// Run task(0) .. task(count - 1) on all threads; each thread takes the next index.
template <class Task>
void parallel_for(ThreadPool& pool, int64_t count, Task&& task) {
  if (count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  pool.run([&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  });
}

}  // namespace outrider
