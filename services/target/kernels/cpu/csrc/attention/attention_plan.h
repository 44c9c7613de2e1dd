// Division of a step's attention into tasks for threads.
#pragma once

#include <algorithm>
#include <vector>

#include "batch.h"
#include "split.h"

namespace outrider {

constexpr int kMaxQueries = 64;  // query vectors that share a split of keys

struct AttentionShape {
  int64_t heads, kv_heads, key_dim, value_dim;
  float scaling;
  int64_t window;      // keys a row sees, its own included; 0: all
  float softcap;       // 0 is off
  const float* sinks;  // [heads] or null
  int64_t value_stride;  // numbers from one value to the next in the pool, if values are the first part of keys; else 0

  int64_t value_pitch() const { return value_stride ? value_stride : value_dim; }
};

// A block of rows of one span, some query heads, some splits of the keys. The worker takes `width` query heads at a time:
// the group of one key head, or a part of it.
struct AttentionTask {
  int32_t span, rows, width;
  int32_t head, heads;    // first query head, and how many
  int32_t split, splits;  // first split, and how many
  int64_t row;
  int64_t partial;  // offset of its partial results, [splits][heads / width][rows][width]; -1 if it computes all splits
  bool near;        // its keys are few enough to prefetch
};

// Query vectors of a task whose splits are separate tasks.
struct AttentionJoin {
  AttentionTask task;
  int64_t first, end;
};

// The tasks of a batch; the same for every layer of like heads.
//
// Few rows are bound by memory: each of their splits is a task, of several key heads if there are enough tasks, because the
// keys of those heads are adjacent in memory. Many rows (a prompt) are bound by arithmetic: a task is all splits of one key
// head.
struct AttentionPlan {
  std::vector<AttentionTask> tasks;
  std::vector<AttentionJoin> joined;  // merges to do after the tasks
  int64_t partials = 0;               // query vectors with unfinished results

  AttentionPlan() = default;
  AttentionPlan(const Batch& batch, const AttentionShape& shape, int threads) {
    const int64_t group = shape.heads / shape.kv_heads;
    width_ = int32_t(std::min<int64_t>(group, kMaxQueries));
    const int64_t bytes = kSplit * (shape.key_dim + shape.value_dim) * 2;
    // Query heads of one task. A group wider than kMaxQueries is computed in parts, which must not include the next group.
    const int64_t together = (group > kMaxQueries ? 1 : std::max<int64_t>(1, kNear / bytes)) * group;
    const bool many = batch.spans >= kTasksPerThread * threads;
    for (int64_t span = 0; span < batch.spans; ++span) {
      const int64_t rows = batch.first[span + 1] - batch.first[span];
      const bool few = rows <= kFewRows, apart = few && batch.start[span] + rows > kSplit;
      const int64_t step = apart || (few && many) ? together : group;
      for (int64_t row = batch.first[span]; row < batch.first[span + 1]; row += kMaxQueries / width_) {
        for (int64_t head = 0; head < shape.heads; head += step) {
          add(batch, span, row, int32_t(head), int32_t(std::min(step, shape.heads - head)), apart, few);
        }
      }
    }
  }

 private:
  static constexpr int64_t kFewRows = 16;
  static constexpr int64_t kTasksPerThread = 4;
  static constexpr int64_t kJoined = 8;  // query vectors
  static constexpr int64_t kNear = 256 << 10;  // bytes of a split that stay in the L2 cache while its heads are computed

  void add(const Batch& batch, int64_t span, int64_t row, int32_t head, int32_t heads, bool apart,
           bool few) {
    const int64_t rows = std::min<int64_t>(kMaxQueries / width_, batch.first[span + 1] - row);
    int64_t seen = 0;
    for (int64_t r = row; r < row + rows; ++r) seen = std::max(seen, batch.positions[r] + 1);
    const int32_t splits = int32_t((seen + kSplit - 1) / kSplit);
    AttentionTask task{int32_t(span), int32_t(rows), width_, head, heads, 0, splits, row, -1, few};
    if (!apart) return tasks.push_back(task);
    task.partial = partials;
    for (int64_t query = 0; query < rows * heads; query += kJoined) {
      joined.push_back({task, query, std::min(query + kJoined, rows * heads)});
    }
    partials += int64_t{task.splits} * rows * heads;
    for (AttentionTask part = task; part.split < task.splits; ++part.split, part.partial += rows * heads) {
      part.splits = 1;
      tasks.push_back(part);
    }
  }

  int32_t width_ = 1;
};

}  // namespace outrider
