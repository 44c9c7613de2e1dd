// The fused speculation loop: drafting and verification of one session, several iterations in one call.
//
//   draft    the EAGLE head writes the rows that it lacks and drafts a chain (eagle_head.cpp); or the narrow copy of the
//            decoder's weights does (quantized self-draft)
//   choose   the leading draft tokens that are worth their rows
//   verify   the last token and these, in one step of the decoder
//   accept   commit the sampled tokens as long as they are the draft's, and the one after them
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
  int64_t verified;  // number of draft tokens verified
  int64_t accepted;  // number of draft tokens accepted
  int64_t committed;  // tokens
  int64_t head_tokens;  // rows of committed tokens that the head has written
  double drafting, verifying;  // seconds of drafting and of verification
  float probabilities[kChain];  // of each draft token, as the head gives them
};

struct FusedLoop {
  int64_t max_iterations;
  double seconds;  // no iteration starts after this time
  uint32_t* text;  // the session's tokens, with room for those of all iterations
  int64_t length;  // number of tokens in it
  int64_t room;  // most tokens to commit, at least 2
  int64_t depth;  // most draft tokens of an iteration
  const Sampling* sampling;
  const int64_t* stops;  // stop tokens
  int64_t stop_count;
  const int32_t* interrupt_fds;  // file descriptors; the loop ends when one is readable
  int64_t interrupt_fd_count;
  int64_t repeat_length;  // the loop ends when the last `repeat_length` tokens occur earlier in the text; 0: never
  const int32_t* pages;  // with room for all iterations
  int64_t page_size;
  int64_t vocab;
  int64_t* tokens;  // [room], committed tokens; -1 where logits are not finite
  LoopIteration* results;  // [max_iterations], results
  // Of the head:
  int64_t head_tokens;  // rows that the head has written
  const float* acceptance_rates;  // [2, 16], acceptance rate of draft tokens by probability bin, greedy sessions first
  double token_gain, token_value, row_cost, step_cost;  // seconds saved and spent; see DraftTokenValue in step/programs.py
  float* head_logits;  // [head_vocab], memory for the head's logits
  int64_t head_vocab;
  const int32_t* head_ids;  // [head_vocab], token ids of its outputs; null if they are the whole vocabulary in order
};

// head: null if the narrow copy drafts. call: the pools of the cache, and memory for [kChain + 1, vocab] logits.
// Returns the number of iterations.
int64_t run_fused_loop(Program& model, Program* head, const Call& call, const FusedLoop& loop);

}  // namespace outrider
