// Attention over a batch, dispatched by number format. attention.h has the templates; only attend.cpp includes it, because
// they are slow to compile.
#pragma once

#include <atomic>
#include <functional>

#include "matrices/weight_prefetch.h"
#include "attention_plan.h"
#include "kv_dot.h"

namespace outrider {

// Queries and results are float32 rows; strides in numbers. Pools are [slot][kv_head][dim].
struct AttendCall {
  AttentionShape shape;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  const void* keys;
  const void* values;
  bool bfloat16;      // multiply keys and queries in bfloat16, else in float32
  PoolFormat format;  // of the pools
};

// State that the threads of one attention call share. Thread i starts with task i.
struct AttendTasks {
  const AttentionPlan& plan;
  float* partials;  // [plan.partials, 2 + value_dim]
  int threads;
  std::atomic<int64_t>& next;       // tasks claimed beyond the first `threads`
  std::atomic<int64_t>& next_join;  // the same for `plan.joined`
};

// One thread's share. wait(): a barrier of all threads; prefetch: weights prefetched meanwhile
void attend(const AttendCall& call, const Batch& batch, const AttendTasks& tasks, int thread, WeightPrefetch& prefetch,
            const std::function<void()>& wait);

}  // namespace outrider
