// Attention over a batch, in whatever format its numbers are; see attention.h, which attend.cpp alone takes in, for it is
// much to compile.
#pragma once

#include <atomic>
#include <functional>

#include "ahead.h"
#include "attention_plan.h"
#include "keys.h"

namespace outrider {

// Queries and results as float32 rows of some stride, in numbers; pools as [slot][kv_head][dim].
struct AttendCall {
  AttentionShape shape;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  const void* keys;
  const void* values;
  bool bfloat16;      // what keys and queries are multiplied in, else float32
  PoolFormat format;  // of the pools
};

// What the threads of an attention share. Each begins with the task of its number.
struct AttendTasks {
  const AttentionPlan& plan;
  float* partials;  // [plan.partials, 2 + value_dim]
  int threads;
  std::atomic<int64_t>& next;       // behind the first `threads` tasks
  std::atomic<int64_t>& next_join;  // as `next`, of what is joined
};

// One thread's part. wait(): until all threads have done their tasks; ahead: what is brought near meanwhile
void attend(const AttendCall& call, const Batch& batch, const AttendTasks& tasks, int thread, Ahead& ahead,
            const std::function<void()>& wait);

}  // namespace outrider
