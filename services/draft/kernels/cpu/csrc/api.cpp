// Entry points of XLA. The Python functions that bind them check the shapes.
#include "attention.h"
#include "candidates.h"
#include "pack.h"
#include "product.h"
#include "xla/ffi/api/ffi.h"

using namespace outrider;
namespace ffi = xla::ffi;

namespace {

ffi::Error refuse(const char* what) { return ffi::Error::InvalidArgument(what); }

template <class T>
const T* as(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}
template <class T>
T* as(ffi::Result<ffi::AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}
// Null where an optional operand has no elements.
template <class T>
const T* given(const ffi::AnyBuffer& buffer) {
  return buffer.element_count() ? as<T>(buffer) : nullptr;
}

// x: [..., inputs]; data: packed weights, of one or several matrices, of which `index` chooses one; scales: of int8.
ffi::Error run_product(ffi::AnyBuffer x, ffi::AnyBuffer data, ffi::AnyBuffer scales, ffi::AnyBuffer index,
                    ffi::Result<ffi::AnyBuffer> y) {
  const int64_t inputs = x.dimensions().back(), outputs = y->dimensions().back();
  const int64_t rows = int64_t(x.element_count()) / inputs, which = *as<int32_t>(index);
  Format format;
  switch (data.element_type()) {
    case ffi::F32: format = Format::kFloat32; break;
    case ffi::U16: format = Format::kBFloat16; break;
    case ffi::U8: format = Format::kInt8; break;
    case ffi::S8: format = Format::kInt4; break;
    default: return refuse("unknown number format of the weight");
  }
  Weight weight(format, outputs, inputs);
  weight.data = as<char>(data) + which * weight.panels * weight.panel_bytes;
  if (format == Format::kInt8) weight.scales = as<float>(scales) + which * weight.panels * kPanel;
  SharedPool::instance().with([&](ThreadPool& threads) {
    const bool wide = x.element_type() == ffi::F32, wide_result = y->element_type() == ffi::F32;
    if (wide && wide_result) product(threads, weight, as<float>(x), rows, as<float>(y));
    else if (wide_result) product(threads, weight, as<BF16>(x), rows, as<float>(y));
    else product(threads, weight, as<BF16>(x), rows, as<BF16>(y));
  });
  return ffi::Error::Success();
}

template <class T>
void attend_in(const ffi::AnyBuffer& q, const ffi::AnyBuffer& pool, ffi::Result<ffi::AnyBuffer>& out,
               AttentionCall<T> call) {
  call.q = as<T>(q);
  call.pool = as<T>(pool);
  call.out = as<T>(out);
  const auto q_shape = q.dimensions(), pool_shape = pool.dimensions();
  call.sessions = q_shape[0], call.rows = q_shape[1], call.heads = q_shape[2], call.dim = q_shape[3];
  call.planes = pool_shape[1], call.kv_heads = pool_shape[2];
  SharedPool::instance().with([&](ThreadPool& threads) { Attention<T>(call).run(threads); });
}

// Operands as of model.layers.backend.attention; missing optional ones have no elements.
ffi::Error run_attention(ffi::AnyBuffer q, ffi::AnyBuffer pool, ffi::AnyBuffer pages, ffi::AnyBuffer visible,
                  ffi::AnyBuffer since, ffi::AnyBuffer scratch_slots, ffi::AnyBuffer scratch_mask, ffi::AnyBuffer sinks,
                  ffi::Result<ffi::AnyBuffer> out, int32_t page_size, float softcap) {
  auto described = [&](auto zero) {
    AttentionCall<decltype(zero)> call{};
    call.pages = as<int32_t>(pages);
    call.visible = as<int32_t>(visible);
    call.since = given<int32_t>(since);
    call.scratch_slots = as<int32_t>(scratch_slots);
    call.scratch_mask = as<uint8_t>(scratch_mask);
    call.sinks = given<float>(sinks);
    call.table_pages = pages.dimensions()[1];
    call.scratch = scratch_slots.dimensions()[1];
    call.page_size = page_size;
    call.softcap = softcap;
    return call;
  };
  if (q.element_type() == ffi::F32) attend_in(q, pool, out, described(float{}));
  else attend_in(q, pool, out, described(BF16{}));
  return ffi::Error::Success();
}

// moves: [2, M] slots of the pool, sources and targets; slots: [N], of the rows. The pool is changed in place; all
// sources are read before any write. Slot 0 is padding and is not written.
ffi::Error run_keep(ffi::AnyBuffer pool, ffi::AnyBuffer moves, ffi::AnyBuffer slots, ffi::AnyBuffer rows,
                ffi::Result<ffi::AnyBuffer> changed) {
  char* to = as<char>(changed);
  if (to != pool.untyped_data()) std::memcpy(to, pool.untyped_data(), pool.size_bytes());
  const int64_t bytes = int64_t(pool.size_bytes()) / pool.dimensions()[0], count = moves.dimensions()[1];
  const int32_t *source = as<int32_t>(moves), *target = source + count;
  static thread_local std::vector<char> moved;
  moved.resize(count * bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (target[i]) std::memcpy(moved.data() + i * bytes, to + source[i] * bytes, bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (target[i]) std::memcpy(to + target[i] * bytes, moved.data() + i * bytes, bytes);
  }
  for (int64_t i = 0; i < int64_t(slots.element_count()); ++i) {
    if (const int32_t slot = as<int32_t>(slots)[i]) std::memcpy(to + slot * bytes, as<char>(rows) + i * bytes, bytes);
  }
  return ffi::Error::Success();
}

// Operands as of model.programs.sampling.candidates.
ffi::Error run_candidates(ffi::AnyBuffer logits, ffi::AnyBuffer ids, ffi::AnyBuffer temperature, ffi::AnyBuffer top_k,
                  ffi::AnyBuffer top_p, ffi::AnyBuffer min_p, ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> tokens,
                  ffi::Result<ffi::AnyBuffer> log_scores, int32_t limit) {
  const auto shape = logits.dimensions();
  const CandidatesCall call{as<float>(logits), given<int32_t>(ids), shape[0], shape[1], shape[2],
                            tokens->dimensions().back(), limit, as<float>(temperature), as<float>(top_p),
                            as<float>(min_p), as<int32_t>(top_k), as<uint32_t>(keys), as<int32_t>(tokens),
                            as<float>(log_scores)};
  SharedPool::instance().with([&](ThreadPool& threads) { candidates(threads, call); });
  return ffi::Error::Success();
}

}  // namespace

using Any = ffi::AnyBuffer;

#pragma GCC visibility push(default)

XLA_FFI_DEFINE_HANDLER_SYMBOL(outrider_draft_product, run_product,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(outrider_draft_attention, run_attention,
                              ffi::Ffi::Bind()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>()
                                  .Attr<int32_t>("page_size")
                                  .Attr<float>("softcap"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(outrider_draft_keep, run_keep,
                              ffi::Ffi::Bind().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Ret<Any>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(outrider_draft_candidates, run_candidates,
                              ffi::Ffi::Bind()
                                  .Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>().Arg<Any>()
                                  .Ret<Any>().Ret<Any>()
                                  .Attr<int32_t>("limit"));

// Bytes of a packed int4 weight.
extern "C" int64_t outrider_draft_int4_bytes(int64_t outputs, int64_t inputs) {
  const Weight weight(Format::kInt4, outputs, inputs);
  return weight.panels * weight.panel_bytes;
}

extern "C" void outrider_draft_pack_int4(const uint16_t* source, int64_t outputs, int64_t inputs, char* to,
                                         int32_t threads) {
  pack_int4_weight(source, outputs, inputs, to, threads);
}

extern "C" void outrider_draft_threads(int32_t count) { SharedPool::instance().set(count); }

#pragma GCC visibility pop
