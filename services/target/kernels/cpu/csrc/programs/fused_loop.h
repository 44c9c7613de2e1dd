// The fused speculation loop: drafting and verification of one session, several iterations in one call.
//
//   draft    the EAGLE head writes the rows that it lacks and drafts a chain (eagle_head.cpp)
//   choose   the draft tokens worth their rows, and second choices beside the first ones
//   verify   the last token and these nodes, in one step of the decoder
//   accept   walk along the sampled tokens; move the cache rows of accepted nodes to their final slots
//
// With a narrow copy of the decoder's weights (quantized self-draft) iterations nest: the inner ones above verify with the
// copy, which is fast, until a chain of its tokens is long enough; then the decoder verifies that chain.
//
// Invariant between iterations: the cache holds every token but the last, and the head's rows end at its last draft.
#pragma once

#include "program.h"

namespace outrider {

constexpr int64_t kChain = 16;  // most draft tokens of an iteration

// The result of an iteration.
struct LoopIteration {
  int64_t written;  // rows of committed tokens that the head computed first
  int64_t draft_tokens;  // number of draft tokens
  int64_t chain;  // draft tokens verified, without second choices
  int64_t second_choices;  // bit i: the second choice for draft token i was verified
  int64_t chain_accepted;  // draft tokens of the chain that were accepted
  int64_t accepted;  // nodes accepted, second choices included
  int64_t committed;  // tokens
  int64_t inner;  // inner iterations, of the narrow copy, that made the chain
  int64_t head_tokens;  // rows of committed tokens that the head has written
  double drafting, verifying;  // seconds of drafting and of verification
  float probabilities[kChain][2];  // probability of each draft token and of its second choice
};

struct FusedLoop {
  int64_t max_iterations;
  double seconds;  // no iteration starts after this time
  uint32_t* text;  // the session's tokens, with room for those of all iterations
  int64_t length;  // number of tokens in it
  int64_t room;  // most tokens to commit
  int64_t head_tokens;  // rows that the head has written
  int64_t depth;  // draft tokens of an iteration; 0: without a head
  int64_t max_second_choices;  // leading draft tokens that may get a second choice
  int64_t chain;  // tokens at which the narrow copy stops drafting; 0: the decoder verifies the head's tokens itself
  int64_t longest;  // most tokens of the copy's chain
  const Sampling* sampling;
  const int64_t* stops;  // stop tokens
  int64_t stop_count;
  const int32_t* interrupt_fds;  // file descriptors; the loop ends when one is readable
  int64_t interrupt_fd_count;
  int64_t repeat_length;  // the loop ends when the last `repeat_length` tokens occur earlier in the text; 0: never
  const int32_t* pages;  // with room for all iterations
  int64_t page_size;
  char* const* pools;  // all pools of the cache, whose rows move
  const int64_t* row_bytes;  // [pool_count]
  int64_t pool_count;
  int64_t vocab;
  int64_t* tokens;  // [room], committed tokens; -1 where logits are not finite
  LoopIteration* results;  // [max_iterations], results
  LoopIteration* inner;  // [max_iterations * chain], results of inner iterations, of one outer iteration after another
  // Of the head:
  const float* acceptance_rates;  // [2, 16], acceptance rate of draft tokens by probability bin, greedy sessions first
  const float* second_acceptance_rates;  // [2, 16], the same for second choices
  double token_gain, token_value, row_cost, step_cost;  // seconds saved and spent; see DraftTokenValue in step/batch.py
  float* head_logits;  // [head_vocab], memory for the head's logits
  int64_t head_vocab;
  const int32_t* head_ids;  // [head_vocab], token ids of its outputs; null if they are the whole vocabulary in order
};

// head: null for none. call: the pools of the cache, and memory for [kChain + max_second_choices + 1, vocab] logits.
// Returns the number of iterations.
int64_t run_fused_loop(Program& model, Program* head, const Call& call, const FusedLoop& loop);

}  // namespace outrider
