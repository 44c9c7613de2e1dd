#include "program.h"

#include <algorithm>

#include "weights/block_rows.h"

namespace outrider {

namespace {

// Bytes of a weight prefetched into the L1 cache before its operation starts.
constexpr int64_t kPrefetchBytes = 8192;

constexpr int64_t kFeeding = kChunkNumbers / kLanes;  // panels of gated pairs that make one whole chunk of an operand

bool reads_the_stream(const Operation& operation) {
  return std::holds_alternative<Capture>(operation) || std::holds_alternative<StoreState>(operation);
}

// First panels of portions: long portions first, because sequential reads are fastest, then shorter ones, so that threads
// finish at about the same time. step: panels that stay in one portion.
std::vector<int64_t> portions_of(int64_t panels, int threads, int64_t step) {
  std::vector<int64_t> starts{0};
  while (starts.back() < panels) {
    const int64_t rest = panels - starts.back(), size = std::max<int64_t>(step, rest / (2 * threads) / step * step);
    for (int i = 0; i < threads && starts.back() < panels; ++i) {
      starts.push_back(std::min(panels, starts.back() + size));
    }
  }
  return starts;
}

}  // namespace

Program::Program(int threads, bool bfloat16, PoolFormat pools, const Program* beside)
    : pool_(beside ? beside->pool_ : std::make_shared<Pool>(threads)), bfloat16_(bfloat16), pools_(pools) {
  scratch_.resize(pool_->threads());
  prefetch_.resize(pool_->threads());
}

void Program::add(Operation operation) {
  if (auto* linear = std::get_if<Linear>(&operation)) {
    linear->operation = operations_.size();
    linear->product = products_++;
    auto* before = operations_.empty() ? nullptr : std::get_if<Linear>(&operations_.back());
    if (before && before->activation != Activation::kNone && linear->input == before->output && !linear->norm.weight) {
      before->feeds = linear->fed = true;
      before->portions = portions_of(before->weight->panels, pool_->threads(), kFeeding);
    }
    linear->portions = portions_of(linear->weight->panels, pool_->threads(), 1);
    if (linear->head) head_ = operations_.size();
  }
  if (std::holds_alternative<JoinEmbedding>(operation)) join_operation_ = operations_.size();
  operations_.push_back(std::move(operation));
}

int32_t Program::plan_of(const AttentionShape& shape) {
  for (size_t i = 0; i < shapes_.size(); ++i) {
    const AttentionShape& one = shapes_[i];
    if (one.heads == shape.heads && one.kv_heads == shape.kv_heads && one.key_dim == shape.key_dim &&
        one.value_dim == shape.value_dim) {
      return int32_t(i);
    }
  }
  shapes_.push_back(shape);
  return int32_t(shapes_.size() - 1);
}

void Program::prepare(const Call& call) {
  const Batch& batch = call.batch;
  if (batch.rows > capacity_) {
    capacity_ = round_up(batch.rows, 64);
    for (int i = 0; i < kBuffers; ++i) buffers_[i] = Buffer(capacity_ * widths_[i] * sizeof(float));
    size_t bytes = 0, shared = 0, fed = 0;
    for (const auto& operation : operations_) {
      if (const auto* linear = std::get_if<Linear>(&operation)) {
        for (const Weight* weight : {linear->weight, linear->narrow, linear->pruned_head.weight}) {
          if (!weight) continue;
          bytes = std::max(bytes, operand_bytes(*weight, kSharedRows));
          shared = std::max(shared, operand_bytes(*weight, capacity_));
          if (linear->fed) fed = std::max(fed, operand_bytes(*weight, capacity_));
        }
      }
    }
    shared_ = Buffer(shared);
    fed_ = Buffer(fed);
    for (auto& scratch : scratch_) scratch = Buffer(bytes);
  }
  if (call.fusion) {
    const size_t bytes = operand_bytes(*call.fusion, kSharedRows), shared = operand_bytes(*call.fusion, capacity_);
    if (shared > shared_.bytes()) shared_ = Buffer(shared);
    for (auto& scratch : scratch_) {
      if (bytes > scratch.bytes()) scratch = Buffer(bytes);
    }
  }
  slots_.resize(batch.rows);
  spans_.resize(batch.rows);
  for (int64_t span = 0; span < batch.spans; ++span) {
    for (int64_t row = batch.first[span]; row < batch.first[span + 1]; ++row) {
      slots_[row] = batch.slot(span, batch.start[span] + row - batch.first[span]);
      spans_[row] = int32_t(span);
    }
  }
  plans_.clear();
  size_t bytes = 0;
  for (const auto& shape : shapes_) {
    plans_.emplace_back(batch, shape, pool_->threads());
    bytes = std::max<size_t>(bytes, plans_.back().partials * (2 + shape.value_dim) * sizeof(float));
  }
  if (bytes > partials_.bytes()) partials_ = Buffer(bytes);
  samples_.reset();
  if (call.samples) samples_.emplace(*call.samples);
  pruned_ = !narrow_ && may_prune(call) && pruning_gate_.enabled();
  if (pruned_) prepare_pruning();
  set_prefetch_ranges();
  const size_t counters = 2 * operations_.size() + 3 + kPruningCounters;
  if (counters_.size() != counters) counters_ = std::vector<Counter>(counters);
  for (auto& counter : counters_) counter.next.store(0, std::memory_order_relaxed);
}

// Sets each thread's prefetch ranges to its first portions, in reading order. Operations before begin_ get empty ranges.
void Program::set_prefetch_ranges() {
  for (int thread = 0; thread < pool_->threads(); ++thread) {
    WeightPrefetch& prefetch = prefetch_[thread];
    prefetch.clear();
    for (size_t i = 0; i < operations_.size(); ++i) {
      const auto* linear = std::get_if<Linear>(&operations_[i]);
      if (linear == nullptr) continue;
      const auto& portions = linear->portions;
      if (i < begin_ || thread + 1 >= int64_t(portions.size())) {
        prefetch.add(nullptr, 0);
        continue;
      }
      const Weight& weight = weight_of(*linear);
      prefetch.add(weight.panel(portions[thread]), (portions[thread + 1] - portions[thread]) * weight.panel_bytes);
    }
  }
}

void Program::run(const Call& call) {
  prepare(call);
  pool_->run([this, &call](int thread) { work(thread, call); });
  if (pruned_) pruning_gate_.observe(panel_states_.share());
}

void Program::run_narrow(const Call& call) {
  narrow_ = true;
  run(call);
  narrow_ = false;
}

void Program::work(int thread, const Call& call) {
  for (size_t i = begin_; i < operations_.size(); ++i) {
    if (skips(operations_[i], call)) continue;
    std::visit([&](const auto& op) { execute(op, thread, call, &counters_[2 * i]); }, operations_[i]);
    if (std::holds_alternative<StoreState>(operations_[i])) continue;  // the next operation only reads the stream too
    prefetch_weights(thread, i + 1);
    wait(thread);
  }
  if (pruned_) sample_pruned(thread, call);
  else if (samples_) sample(thread);
  if (call.fusion) bfloat16_ ? fuse<BF16>(thread, call) : fuse<float>(thread, call);
}

bool Program::skips(const Operation& operation, const Call& call) const {
  if (std::holds_alternative<StoreState>(operation)) return call.states == nullptr;
  const auto* capture = std::get_if<Capture>(&operation);
  return capture && (call.columns == nullptr || call.columns[capture->mark] < 0);
}

void Program::prefetch_weights(int thread, size_t operation) const {
  while (operation < operations_.size() && reads_the_stream(operations_[operation])) ++operation;
  if (operation == operations_.size()) return;
  const auto* linear = std::get_if<Linear>(&operations_[operation]);
  if (linear == nullptr || thread + 1 >= int64_t(linear->portions.size())) return;
  const Weight& weight = weight_of(*linear);
  const char* from = weight.panel(linear->portions[thread]);
  for (int64_t i = 0; i < std::min(kPrefetchBytes, weight.panel_bytes); i += 64) prefetch_l1(from + i);
}

void read_row(const Table& table, int64_t id, float* to) {
  if (table.packed) dequantize_output(*table.packed, id, to);
  else if (table.numbers16) copy_as(to, table.numbers16 + id * table.width, table.width);
  else copy_as(to, table.numbers32 + id * table.width, table.width);
}

void Program::execute(const Embed& op, int thread, const Call& call, Counter* next) {
  const Floats scale = floats(op.scale);
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    float* to = row(kResidual, index);
    read_row(op.table, call.batch.ids[index], to);
    for (int64_t i = 0; i < op.table.width; i += kLanes) {
      const Mask mask = lanes(op.table.width - i);
      store(to + i, mul(load(to + i, mask), scale), mask);
    }
  });
}

void Program::fill_row(const Linear& op, const Call& call, const Weight& weight, const Operand& operand, int64_t index,
                       float* scratch) {
  const float* from = row(op.input, op.head ? call.batch.sampled[index] : index);
  if (op.norm.weight) {
    normalise(op.norm, from, scratch, op.input_width);
    from = scratch;
  }
  fill_operand(operand, weight, index, from);
}

void Program::execute(const Linear& op, int thread, const Call& call, Counter* next) {
  const int64_t rows = op.head ? call.batch.sampled_rows : call.batch.rows;
  if (rows == 0) return prefetch_[thread].reached(op.product);
  alignas(64) float scratch[kNormWidth];
  const Weight& weight = weight_of(op);
  const Operand operand =
      op.fed ? operand_in(fed_.as<char>(), weight, rows)
             : operand_of(weight, thread, next + 1, rows, [&](const Operand& to, int64_t index) {
                 fill_row(op, call, weight, to, index, scratch);
               });
  prefetch_[thread].reached(op.product);
  const Passes passes(weight, rows);
  portions(*next, thread, int64_t(op.portions.size()) - 1, [&](int64_t portion) {
    multiply_panels(weight, op.portions[portion], op.portions[portion + 1], operand, passes,
                    [&](int64_t panel, int64_t first, int64_t count, const float* tile) {
                      if (op.activation != Activation::kNone) store_gated(op, panel, first, count, tile);
                      else store_plain(op, call, panel, first, count, tile);
                      const bool whole = panel % kFeeding == kFeeding - 1 || panel == weight.panels - 1;
                      if (op.feeds && whole && first + count == rows) feed(op, panel, rows);
                    });
  });
}

// Writes the next operation's operand from the outputs of the panels up to this one, while they are in the cache, so that
// not every thread reads them again.
void Program::feed(const Linear& op, int64_t panel, int64_t rows) {
  const Weight& weight = weight_of(behind(op));
  const Operand operand = operand_in(fed_.as<char>(), weight, rows);
  const int64_t begin = panel / kFeeding * kChunkNumbers, end = std::min(begin + kChunkNumbers, weight.inputs);
  for (int64_t index = 0; index < rows; ++index) fill_operand(operand, weight, index, row(op.output, index), begin, end);
}

// Stores activation(gate) * value of the panel's 16 gates and 16 values.
void Program::store_gated(const Linear& op, int64_t panel, int64_t first, int64_t count, const float* tile) {
  const Mask mask = lanes(op.output_width - panel * kLanes);
  for (int64_t m = 0; m < count; ++m, tile += kPanel) {
    const Floats gate = op.activation == Activation::kSilu ? silu(load(tile)) : gelu_tanh(load(tile));
    store(row(op.output, first + m) + panel * kLanes, mul(gate, load(tile + kLanes)), mask);
  }
}

void Program::store_plain(const Linear& op, const Call& call, int64_t panel, int64_t first, int64_t count,
                          const float* tile) {
  const int64_t outputs = op.weight->outputs;
  float* base = op.head ? call.logits : row(op.output, 0) + op.column;
  const int64_t stride = op.head ? outputs : widths_[op.output];
  const Floats cap = floats(op.softcap);
  for (int z = 0; z < 2; ++z) {
    const int64_t n = panel * kPanel + z * kLanes;
    const Mask mask = lanes(outputs - n);
    const Floats bias = op.bias ? load(op.bias + n, mask) : floats();
    for (int64_t m = 0; m < count; ++m) {
      float* to = base + (first + m) * stride + n;
      Floats y = outrider::add(load(tile + m * kPanel + z * kLanes), bias);
      if (op.add) y = outrider::add(load(to, mask), y);
      if (op.softcap > 0.0f) y = mul(cap, tanh(div(y, cap)));
      store(to, y, mask);
    }
  }
}

void Program::execute(const AddNorm& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    alignas(64) float branch[kNormWidth];
    normalise(op.norm, row(op.input, index), branch, op.width);
    float* to = row(op.output, index);
    for (int64_t i = 0; i < op.width; i += kLanes) {
      const Mask mask = lanes(op.width - i);
      store(to + i, outrider::add(load(to + i, mask), load(branch + i, mask)), mask);
    }
  });
}

void Program::execute(const Capture& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.captured_rows, [&](int64_t index) {
    const int64_t place = index * call.feature_width + call.columns[op.mark];
    if (bfloat16_) capture(op, call, index, static_cast<BF16*>(call.features) + place);
    else capture(op, call, index, static_cast<float*>(call.features) + place);
  });
}

template <class T>
void Program::capture(const Capture& op, const Call& call, int64_t index, T* to) {
  alignas(64) float scratch[kNormWidth];
  const float* from = row(kResidual, call.captured[index]);
  if (op.norm.weight) {
    normalise(op.norm, from, scratch, op.width);
    from = scratch;
  }
  copy_as(to, from, op.width);
}

void Program::sample(int thread) {
  portions(counters_.back(), thread, samples_->rows(), [&](int64_t row) { samples_->sample(row); });
}

// The product of captured rows with the fusion.
template <class T>
void Program::fuse(int thread, const Call& call) {
  const Weight& weight = *call.fusion;
  Counter* next = &counters_[2 * operations_.size()];
  const auto* features = static_cast<const T*>(call.features);
  const int64_t rows = call.captured_rows;
  if (rows == 0) return;
  const Operand operand = operand_of(weight, thread, next + 1, rows, [&](const Operand& to, int64_t index) {
    fill_operand(to, weight, index, features + index * call.feature_width);
  });
  const Passes passes(weight, rows);
  portions(*next, thread, weight.panels, [&](int64_t panel) {
    multiply_panel(weight, panel, operand, passes, [&](int64_t first, int64_t count, const float* tile) {
      store_panel(weight, panel, first, count, tile, call.fusion_bias, static_cast<T*>(call.fused));
    });
  });
}

namespace {

// Rotary embedding of a head's first `rotary_dim` numbers, whose halves form the rotated pairs.
void rotate_halves(float* head, const float* cosines, const float* sines, int64_t rotary_dim) {
  const int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Mask mask = lanes(half - i);
    const Floats c = load(cosines + i, mask), s = load(sines + i, mask);
    const Floats a = load(head + i, mask), b = load(head + half + i, mask);
    store(head + i, fmsub(a, c, mul(b, s)), mask);
    store(head + half + i, fmadd(b, c, mul(a, s)), mask);
  }
}

}  // namespace

template <class P>
void Program::store_heads(const Rotate& op, const Call& call, int64_t index, int64_t head, int64_t slot) {
  float* key = row(kWide, index) + (op.heads + head) * op.key_dim;
  float* value = row(kWide, index) + (op.heads + op.kv_heads) * op.key_dim + head * op.value_dim;
  P* keys = static_cast<P*>(const_cast<void*>(call.keys[op.layer]));
  P* values = static_cast<P*>(const_cast<void*>(call.values[op.layer]));
  copy_as(keys + (slot * op.kv_heads + head) * op.key_dim, key, op.key_dim);
  copy_as(values + (slot * op.kv_heads + head) * op.value_dim, value, op.value_dim);
}

void Program::execute(const Rotate& op, int thread, const Call& call, Counter* next) {
  portions(*next, thread, call.batch.rows, [&](int64_t index) {
    const int64_t position = call.batch.positions[index];
    prefetch_[thread].fetch(WeightPrefetch::kRowLines);
    const float* cosines = op.cosines + position * (op.rotary_dim / 2);
    const float* sines = op.sines + position * (op.rotary_dim / 2);
    for (int64_t head = 0; head < op.heads + op.kv_heads; ++head) {
      float* numbers = row(kWide, index) + head * op.key_dim;
      const Norm& norm = head < op.heads ? op.query_norm : op.key_norm;
      if (norm.weight) normalise(norm, numbers, numbers, op.key_dim);
      rotate_halves(numbers, cosines, sines, op.rotary_dim);
    }
    for (int64_t head = 0; head < op.kv_heads; ++head) {
      with_formats(bfloat16_, pools_, [&](auto, auto stored) {
        store_heads<decltype(stored)>(op, call, index, head, slots_[index]);
      });
    }
  });
}

void Program::execute(const Attend& op, int thread, const Call& call, Counter* next) {
  const AttendCall attention{op.shape,
                             row(kWide, 0),
                             widths_[kWide],
                             row(kAttended, 0),
                             widths_[kAttended],
                             call.keys[op.layer],
                             call.values[op.layer],
                             bfloat16_,
                             pools_};
  const AttendTasks tasks{plans_[op.plan], partials_.as<float>(), pool_->threads(), next->next, next[1].next};
  attend(attention, call.batch, tasks, thread, prefetch_[thread], [this, thread] { wait(thread); });
}

}  // namespace outrider
