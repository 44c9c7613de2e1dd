// The threads of all kernels: as many as the process was told, working for one call at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "spin_wait.h"

namespace outrider {

// Threads that help a caller if they come in time. Work is taken portion by portion, so the caller gets everything done
// without them, too: on a busy machine a thread may get its core only after the work is over, and is not waited for then.
class Crew {
 public:
  explicit Crew(int threads) {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  ~Crew() {
    stopping_ = true;
    begin();
    for (auto& helper : helpers_) helper.join();
  }

  int threads() const { return int(helpers_.size()) + 1; }

  // job() takes portions until there are none left; it runs here, and in every helper that comes before it is done here.
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
  // After a job a helper looks for the next one for so many turns (some tens of microseconds) before it sleeps: kernels
  // follow one another closely, but other processes may need the core meanwhile.
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
  alignas(64) std::atomic<int> inside_{kClosed};  // helpers at work, and whether no more may come
};

class Threads {
 public:
  static Threads& instance() {
    static Threads threads;
    return threads;
  }

  void set(int count) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!crew_ || crew_->threads() != count) crew_ = std::make_unique<Crew>(count);
  }

  // job(crew). XLA may call kernels that do not depend on one another at the same time; they wait for one another.
  template <class Job>
  void with(Job&& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!crew_) crew_ = std::make_unique<Crew>(1);
    job(*crew_);
  }

 private:
  std::mutex mutex_;
  std::unique_ptr<Crew> crew_;
};

// Run task(0) .. task(count - 1) on all threads, each taking the next one.
template <class Task>
void share(Crew& crew, int64_t count, Task&& task) {
  if (count <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  crew.run([&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  });
}

}  // namespace outrider
