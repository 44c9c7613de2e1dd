#include "attend.h"

#include <memory>

#include "attention.h"
#include "threads/pool.h"

namespace outrider {

namespace {

template <class T, class P>
void do_tasks(const AttendCall& call, const Batch& batch, const AttendTasks& tasks, int thread, WeightPrefetch& prefetch) {
  static thread_local std::unique_ptr<char[]> memory(new char[sizeof(AttentionWorker<T, P>) + 64]);
  void* place = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
  auto* worker = new (place) AttentionWorker<T, P>(batch, call, prefetch);
  const Registers<T> registers;
  const std::vector<AttentionTask>& all = tasks.plan.tasks;
  const auto take = [&] { return size_t(tasks.threads + tasks.next.fetch_add(1, std::memory_order_relaxed)); };
  for (size_t i = size_t(thread), next; i < all.size(); i = next) {
    // A thread claims its next task before a short one, so that it can prefetch it. Before a long task it does not, because
    // the claimed task would wait for it.
    const bool early = all[i].near;
    if (early) next = take();
    worker->run(all[i], early && next < all.size() ? &all[next] : nullptr, tasks.partials);
    if (!early) next = take();
  }
}

}  // namespace

void attend(const AttendCall& call, const Batch& batch, const AttendTasks& tasks, int thread, WeightPrefetch& prefetch,
            const std::function<void()>& wait) {
  with_arithmetic(call.bfloat16, call.format, [&](auto computed, auto stored) {
    do_tasks<decltype(computed), decltype(stored)>(call, batch, tasks, thread, prefetch);
  });
  const auto& joined = tasks.plan.joined;
  if (joined.empty()) return;
  wait();
  each_portion(tasks.next_join, thread, tasks.threads, int64_t(joined.size()),
               [&](int64_t i) { join_splits(call, joined[i], tasks.partials); });
}

}  // namespace outrider
