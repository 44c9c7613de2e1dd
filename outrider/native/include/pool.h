// Threads that work through a step together: woken once a step, then in step with one another by a spinning barrier.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace outrider {

// A barrier that spins, because the wait is a fraction of a microsecond as long as every thread has a core.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}

  // idle(): what can be done meanwhile, a little at a time
  template <class Idle>
  void wait(Idle&& idle) {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) {
        idle();
        _mm_pause();
      } else {
        sched_yield();  // somebody else may need this core to get here
      }
    }
  }
  void wait() {
    wait([] {});
  }

 private:
  static constexpr int kSpins = 4000;
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
};

// function(i) for each of `count` portions that threads share: a thread begins with the one of its number, and takes
// others as long as nobody else has. next: how many of those behind the first `threads` are taken
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      ++epoch_;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }
  Barrier& barrier() { return barrier_; }

  void run(const std::function<void(int)>& job) {
    if (threads_ == 1) return job(0);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job_ = &job;
      pending_.store(threads_ - 1, std::memory_order_relaxed);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    for (int spins = 0; pending_.load(std::memory_order_acquire) > 0; ++spins) {
      if (spins < 4000) _mm_pause(); else sched_yield();
    }
  }

 private:
  // After a job a worker looks for the next one for so many turns (some tens of microseconds) before it sleeps: steps
  // follow one another closely, but other processes may need the core meanwhile.
  static constexpr int kLinger = 2000;

  void work(int index) {
    unsigned seen = 0;
    for (;;) {
      for (int spins = 0; spins < kLinger && epoch_.load(std::memory_order_acquire) == seen; ++spins) _mm_pause();
      if (epoch_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
      }
      seen = epoch_.load(std::memory_order_acquire);
      if (stopping_) return;
      (*job_)(index);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int threads_;
  Barrier barrier_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> pending_{0};
};

}  // namespace outrider
