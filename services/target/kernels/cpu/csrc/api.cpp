// The library's C interface for ctypes. Callers validate arguments; the functions do not.
#include <cstdint>

#include "sampling/sampling.h"
#include "attention/kv_move.h"
#include "matrices/checksum.h"
#include "matrices/invariant_product.h"
#include "matrices/quantize.h"
#include "matrices/stored_rows.h"
#include "programs/program.h"
#include "programs/fused_loop.h"

using namespace outrider;

extern "C" {

// --- weights ---

// A weight without memory. groups: of 64 inputs in a super-block; 1 for formats without
OwnWeight* outrider_weight_new(int32_t format, int64_t outputs, int64_t inputs, int64_t groups) {
  return new OwnWeight(Weight(Format(format), outputs, inputs, groups));
}
// Gives it memory of its own, of zeros.
void outrider_weight_allocate(OwnWeight* weight) { weight->allocate(); }
// Gives it the caller's memory, which outlives it. scales: of int8 weights
void outrider_weight_place(OwnWeight* weight, void* numbers, void* scales) {
  weight->place(Buffer::view(numbers, weight->bytes()), Buffer::view(scales, weight->scale_bytes()));
}
void outrider_weight_free(OwnWeight* weight) { delete weight; }
int64_t outrider_weight_bytes(const OwnWeight* weight) { return weight->bytes() + weight->scale_bytes(); }

// The weight's memory. parts: address (0 without memory) and bytes of the numbers, then of the scales
void outrider_weight_memory(const OwnWeight* weight, int64_t* parts) {
  parts[0] = reinterpret_cast<int64_t>(weight->memory.as<char>());
  parts[1] = weight->bytes();
  parts[2] = reinterpret_cast<int64_t>(weight->scale_memory.as<char>());
  parts[3] = weight->scale_bytes();
}
uint64_t outrider_checksum(const void* from, int64_t bytes) { return checksum(static_cast<const char*>(from), bytes); }

// source: [count, inputs], float32 or bfloat16 by the weight's format; outputs: [count], their output indices
void outrider_weight_pack(OwnWeight* weight, const void* source, const int64_t* outputs, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t from = i * weight->inputs;
    if (weight->format == Format::kFloat32) pack_plain(*weight, outputs[i], static_cast<const float*>(source) + from);
    else pack_plain(*weight, outputs[i], static_cast<const uint16_t*>(source) + from);
  }
}
// values: [count, inputs]; scales: [count] (int8) or [count, groups of 32] (int4); centres: as scales, int4 alone; outputs
// as above
void outrider_weight_pack_quantized(OwnWeight* weight, const int8_t* values, const float* scales, const float* centres,
                                    const int64_t* outputs, int64_t count) {
  const int64_t groups = 2 * weight->k / kGroup;
  for (int64_t i = 0; i < count; ++i) {
    const int8_t* from = values + i * weight->inputs;
    if (weight->format == Format::kInt8) pack_int8(*weight, outputs[i], from, scales[i]);
    else pack_int4(*weight, outputs[i], from, scales + i * groups, centres + i * groups);
  }
}

// Quantizes first. source: [count, inputs], float32 or bfloat16; steps: [candidates], int4 alone
void outrider_weight_quantize(OwnWeight* weight, const void* source, int32_t bfloat16, const int64_t* outputs,
                              int64_t count, const int32_t* steps, int32_t candidates, int32_t threads) {
  quantize_in_parallel(*weight, static_cast<const char*>(source), bfloat16 != 0, outputs, count, steps, candidates,
                       threads);
}

// Numbers as a checkpoint stores them; see matrices/stored_rows.h. rows: [count, row_bytes], of a GGUF tensor
void outrider_weight_pack_gguf(OwnWeight* weight, const uint8_t* rows, int64_t row_bytes, const int64_t* outputs,
                               int64_t count, int32_t threads) {
  pack_gguf(*weight, rows, row_bytes, outputs, count, threads);
}
// rows: separate arrays; those that the format does not have are null
void outrider_weight_pack_arrays(OwnWeight* weight, const BlockRow* rows, const int64_t* outputs, int64_t count,
                                 int32_t threads) {
  pack_arrays(*weight, *rows, outputs, count, threads);
}

// Outputs as float32. to: [count, inputs]; outputs: [count], their indices
void outrider_weight_dequantize(const Weight* weight, const int64_t* outputs, int64_t count, float* to, int32_t threads) {
  in_parts(count, threads, [&](int64_t first, int64_t rows) {
    for (int64_t i = first; i < first + rows; ++i) dequantize_output(*weight, outputs[i], to + i * weight->inputs);
  });
}

// --- single operators ---

// Enable or disable the matrix unit, for tests that compare both. Returns the previous setting.
int32_t outrider_use_matrix_unit(int32_t wanted) { return MatrixUnit::use(wanted != 0); }
int32_t outrider_has_matrix_unit() { return MatrixUnit::available(); }

Pool* outrider_pool_new(int32_t threads) { return new Pool(threads); }
void outrider_pool_free(Pool* pool) { delete pool; }

// y = x W^T (+ bias). x: [rows, inputs], y: [rows, outputs], float32 or bfloat16.
void outrider_linear(Pool* pool, const Weight* weight, const float* bias, const void* x, void* y, int64_t rows,
                     int32_t bfloat16) {
  Buffer memory(operand_bytes(*weight, rows));
  const Operand operand = operand_in(memory.as<char>(), *weight, rows);
  std::atomic<int64_t> next_row{0}, next_panel{0};
  pool->run([&](int) {
    for (int64_t row; (row = next_row.fetch_add(1)) < rows;) {
      const int64_t from = row * weight->inputs;
      if (bfloat16) fill_operand(operand, *weight, row, static_cast<const BF16*>(x) + from);
      else fill_operand(operand, *weight, row, static_cast<const float*>(x) + from);
    }
    pool->barrier().wait();
    const Passes passes(*weight, rows);
    const int64_t run = passes.together();
    for (int64_t begin; (begin = next_panel.fetch_add(run)) < weight->panels;) {
      multiply_panels(*weight, begin, std::min(begin + run, weight->panels), operand, passes,
                      [&](int64_t panel, int64_t first, int64_t count, const float* tile) {
                        if (bfloat16) store_panel(*weight, panel, first, count, tile, bias, static_cast<BF16*>(y));
                        else store_panel(*weight, panel, first, count, tile, bias, static_cast<float*>(y));
                      });
    }
  });
}

// q: [rows, heads, key_dim] float32, out: [rows, heads, value_dim] float32; format: of the pools. bfloat16: multiply keys
// and queries in bfloat16, else in float32
void outrider_attention(Pool* pool, const BatchView* view, const AttentionShape* shape, const float* q, float* out,
                        const void* keys, const void* values, int32_t bfloat16, int32_t format) {
  const Batch batch(*view);
  const AttentionPlan plan(batch, *shape, pool->threads());
  Buffer partials(plan.partials * (2 + shape->value_dim) * sizeof(float));
  std::atomic<int64_t> next{0}, next_join{0};
  const AttendCall call{*shape, q,    shape->heads * shape->key_dim, out, shape->heads * shape->value_dim,
                        keys,   values, bfloat16 != 0,               PoolFormat(format)};
  const AttendTasks tasks{plan, partials.as<float>(), pool->threads(), next, next_join};
  pool->run([&](int thread) {
    WeightPrefetch nothing;
    attend(call, batch, tasks, thread, nothing, [&] { pool->barrier().wait(); });
  });
}

// Products of groups of rows with one matrix a group; see invariant_product.h.
void outrider_product(Pool* pool, const Product* product) {
  struct Task { int64_t group, row, row_end, output, output_end; };
  std::vector<Task> tasks;
  for (int64_t group = 0; group < product->groups; ++group) {
    for (int64_t output = 0; output < product->outputs; output += kOutputBlock) {
      for (int64_t row = product->first[group]; row < product->first[group + 1]; row += kRowBlock) {
        tasks.push_back({group, row, std::min(row + kRowBlock, product->first[group + 1]), output,
                         std::min(output + kOutputBlock, product->outputs)});
      }
    }
  }
  std::atomic<int64_t> next{0};
  auto work = [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i; (i = next.fetch_add(1)) < int64_t(tasks.size());) {
      const Task& task = tasks[i];
      ProductBlock<T>(*product, task.group).run(task.row, task.row_end, task.output, task.output_end);
    }
  };
  pool->run([&](int) {
    if (product->bfloat16) work(BF16{});
    else work(float{});
  });
}

// y = function(x), elementwise.
void outrider_apply(Pool* pool, int32_t function, const void* x, void* y, int64_t count, int32_t bfloat16) {
  constexpr int64_t kPiece = 4096;
  std::atomic<int64_t> next{0};
  auto work = [&](auto zero) {
    using T = decltype(zero);
    for (int64_t from; (from = next.fetch_add(kPiece)) < count;) {
      apply_to(Function(function), static_cast<const T*>(x) + from, static_cast<T*>(y) + from,
               std::min(kPiece, count - from));
    }
  };
  const std::function<void(int)> job = [&](int) {
    if (bfloat16) work(BF16{});
    else work(float{});
  };
  if (count <= kPiece) job(0);
  else pool->run(job);
}

// --- sampling ---

// Small calls run on the calling thread alone.
void outrider_sample(Pool* pool, const SampleCall* call) {
  const SampleBatch samples(*call);
  std::atomic<int64_t> next{0};
  auto work = [&](int) {
    for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < samples.rows();) samples.sample(row);
  };
  constexpr int64_t kAlone = 1 << 17;  // logits; below this, waking other threads takes longer than the work
  if (call->rows * call->vocab < kAlone) work(0);
  else pool->run(work);
}

// --- programs ---

// beside: a program whose thread pool it shares; null creates a pool
Program* outrider_program_new(int32_t threads, int32_t bfloat16, int32_t pools, const Program* beside) {
  return new Program(threads, bfloat16 != 0, PoolFormat(pools), beside);
}
void outrider_program_free(Program* program) { delete program; }
void outrider_program_width(Program* program, int32_t buffer, int64_t width) {
  program->set_width(BufferId(buffer), width);
}

// numbers: [rows, width], or a packed weight. kind: float32 (0), bfloat16 (1) or packed (2)
static Table table_of(const void* numbers, int32_t kind, int64_t width) {
  return {kind == 1 ? static_cast<const BF16*>(numbers) : nullptr, kind == 0 ? static_cast<const float*>(numbers) : nullptr,
          kind == 2 ? static_cast<const Weight*>(numbers) : nullptr, width};
}

void outrider_program_embed(Program* program, const void* table, int32_t kind, int64_t width, float scale) {
  program->add(Embed{table_of(table, kind, width), scale});
}
void outrider_program_linear(Program* program, const Weight* weight, const float* bias, const float* norm,
                             float epsilon, int32_t input, int32_t output, int64_t output_width, int64_t column,
                             int32_t add, int32_t activation, int32_t head, float softcap) {
  program->add(Linear{weight, nullptr, bias, Norm{norm, epsilon}, BufferId(input), BufferId(output), weight->inputs,
                      output_width, add != 0, Activation(activation), head != 0, softcap, {},
                      0, 0, false, false, {}, column});
}
// A copy in fewer bits of the weight that was added last, for drafting steps.
void outrider_program_narrow(Program* program, const Weight* weight) { program->narrow(*weight); }
// A narrow copy of the LM head, and for each output (in whole panels) the norm of the weight difference and the norm of the
// narrow weight; see pruned_head.h. The head is the last operation.
void outrider_program_prune_head(Program* program, const Weight* weight, const float* error_norms, const float* narrow_norms) {
  program->pruned_head(PrunedHead{weight, error_norms, narrow_norms});
}
void outrider_program_add_norm(Program* program, const float* norm, float epsilon, int32_t input, int32_t output,
                               int64_t width) {
  program->add(AddNorm{Norm{norm, epsilon}, BufferId(input), BufferId(output), width});
}
void outrider_program_rotate(Program* program, int32_t layer, const AttentionShape* shape, int64_t rotary_dim,
                             const float* cosines, const float* sines, const float* query_norm, const float* key_norm,
                             float epsilon) {
  program->add(Rotate{layer, shape->heads, shape->kv_heads, shape->key_dim, shape->value_dim, rotary_dim, cosines, sines,
                      Norm{query_norm, epsilon}, Norm{key_norm, epsilon}});
}
void outrider_program_attend(Program* program, int32_t layer, const AttentionShape* shape) {
  program->add(Attend{layer, *shape, program->plan_of(*shape)});
}
void outrider_program_capture(Program* program, int32_t mark, int64_t width, const float* norm, float epsilon) {
  program->add(Capture{mark, width, Norm{norm, epsilon}});
}
void outrider_program_store_state(Program* program, int64_t column, int64_t width) { program->add(StoreState{column, width}); }
void outrider_program_load_state(Program* program, int64_t width) { program->add(LoadState{width}); }
void outrider_program_join_embedding(Program* program, const void* table, int32_t kind, int64_t width, const float* embedding,
                           const float* state, float epsilon, int32_t after_norm) {
  program->add(JoinEmbedding{table_of(table, kind, width), Norm{embedding, epsilon}, Norm{state, epsilon}, after_norm != 0});
}

// states, state_width: the pool of hidden states; null if the program stores none. samples: sampling of the first rows of
// `logits`; null for none. columns: [marks], the column of each captured state in a row of features, or -1; null for none.
// Returns the number of steps computed: 1, or those of multi-step decoding.
int64_t outrider_program_run(Program* program, const BatchView* batch, const void* const* keys, const void* const* values,
                          void* states, int64_t state_width, float* logits, const SampleCall* samples,
                          const int64_t* columns, const int64_t* rows, int64_t count, void* features, int64_t width,
                          const Weight* fusion, const float* fusion_bias, void* fused, const MultiStep* multi_step) {
  const Call call{Batch(*batch), keys, values, states, state_width, logits, samples, columns, rows, count,
                  features, width, fusion, fusion_bias, fused};
  if (multi_step) return multi_step->draft_chain ? program->draft_chain(call, *multi_step) : program->run(call, *multi_step);
  program->run(call);
  return 1;
}

// The fused speculation loop; see fused_loop.h. logits: [kChain + 1, vocab]
int64_t outrider_program_fused_loop(Program* program, Program* head, const void* const* keys, const void* const* values,
                                void* states, int64_t state_width, float* logits, const FusedLoop* loop) {
  Call call{};
  call.keys = keys, call.values = values;
  call.states = states, call.state_width = state_width;
  call.logits = logits;
  return run_fused_loop(*program, head, call, *loop);
}

// Copy rows of a KV cache between slots, the same slots in every pool, in order.
void outrider_move_rows(char* const* pools, const int64_t* row_bytes, int64_t count, const int64_t* sources,
                        const int64_t* destinations, int64_t moves) {
  move_rows(pools, row_bytes, count, sources, destinations, moves);
}

// Read bandwidth of all threads together, in bytes per second, over memory larger than the caches: the floor of a step.
double outrider_read_bandwidth(Pool* pool, const char* memory, int64_t bytes, double (*now)()) {
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> sink{0};
  constexpr int64_t kPiece = 1 << 18, kPrefetchDistance = 4096;
  const double start = now();
  pool->run([&](int) {
    Ints sum = ints();
    for (int64_t piece; (piece = next.fetch_add(1)) < bytes / kPiece;) {
      for (int64_t i = 0; i < kPiece; i += 64) {
        sum = bit_xor(sum, load_ints(memory + piece * kPiece + i));
        prefetch_l1(memory + piece * kPiece + i + kPrefetchDistance);
      }
    }
    sink += sum_of(sum);
  });
  return double(bytes) / (now() - start);
}

}  // extern "C"
