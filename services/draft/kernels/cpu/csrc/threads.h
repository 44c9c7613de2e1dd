// The threads of all kernels: as many as the process was told, woken by one call at a time.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "pool.h"

namespace outrider {

class Threads {
 public:
  static Threads& instance() {
    static Threads threads;
    return threads;
  }

  void set(int count) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pool_ || pool_->threads() != count) pool_ = std::make_unique<Pool>(count);
  }

  // job(pool): may run work on all threads. XLA may call kernels that do not depend on one another at the same time.
  template <class Job>
  void with(Job&& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pool_) pool_ = std::make_unique<Pool>(1);
    job(*pool_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Pool> pool_;
};

// Run task(0) .. task(count - 1) on all threads, each taking the next one.
template <class Task>
void share(Pool& pool, int64_t count, Task&& task) {
  if (count <= 1 || pool.threads() == 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  pool.run([&](int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  });
}

}  // namespace outrider
