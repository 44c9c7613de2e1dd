// Guesses and their verification by the decoder, round after round, of one session.
//
//   guess    the head writes the rows that it lacks and drafts a chain (follow.cpp)
//   choose   as many of its guesses as are worth their rows, and second ones beside the first
//   verify   the last token and these nodes, in one step of the decoder
//   accept   a walk along what was drawn; rows of accepted nodes move to their places
//
// With a narrow copy of the decoder's weights there are rounds within rounds: those above are the copy's, which is
// quick to verify with, until a chain of its tokens is long enough; then that is what the decoder verifies.
//
// A session between two rounds: the cache holds every token but the last, and the head's rows end where it guessed last.
#pragma once

#include "program.h"

namespace outrider {

constexpr int64_t kChain = 16;  // guesses of a round, at most

// What came of a round.
struct Round {
  int64_t written;   // rows of committed tokens that the head computed first
  int64_t guesses;   // that it drafted
  int64_t chain;     // of these were verified
  int64_t beside;    // bit i: a second guess beside guess i was verified
  int64_t right;     // guesses of the chain that were committed
  int64_t accepted;  // nodes that were, second guesses included
  int64_t committed;  // tokens
  int64_t within;     // rounds of the copy that made its chain
  int64_t known;      // rows of committed tokens that the head has written
  double guessing, verifying;  // seconds
  float odds[kChain][2];       // of each guess and of its second
};

struct Rounds {
  int64_t most;      // rounds
  double seconds;    // after which none begins
  uint32_t* text;    // the session's tokens, with room for those of all rounds
  int64_t length;    // of them
  int64_t room;      // tokens that may be committed
  int64_t known;     // rows that the head has written
  int64_t depth;     // guesses of a round; 0 where no head is asked
  int64_t others;    // the first guesses, beside which a second may stand
  int64_t chain;     // tokens after which the copy drafts no more; 0 where guesses go to the decoder itself
  int64_t longest;   // tokens that it may have drafted then
  const Sampling* sampling;
  const int64_t* stops;  // tokens after which the session does not go on
  int64_t stop_count;
  const int32_t* files;  // the rounds end when one can be read
  int64_t file_count;
  int64_t same;            // and when so many last tokens stood in the text before; 0 for never
  const int32_t* pages;    // with room for all rounds
  int64_t page_size;
  char* const* pools;        // of the cache, all of them, for rows that move
  const int64_t* row_bytes;  // [pool_count]
  int64_t pool_count;
  int64_t vocab;
  int64_t* tokens;  // [room], what is committed; -1 where none could be drawn
  Round* told;      // [most]
  Round* within;    // [most * chain], the copy's, those of one round behind those of the one before
  // Of the head:
  const float* odds;         // [2, 16], chances of guesses by what it says, greedy sessions first
  const float* second_odds;  // [2, 16], of second ones
  double next, token, row, step;  // seconds that guesses bring and take; see Worth in batch.py
  float* head_logits;             // [head_vocab], room for what it says
  int64_t head_vocab;
  const int32_t* head_ids;  // [head_vocab], which tokens these are; null if they are all, in order
};

// head: null where none is asked. call: the pools of the cache, and room for [kChain + others + 1, vocab] logits.
// Returns how many rounds there were.
int64_t run_rounds(Program& model, Program* head, const Call& call, const Rounds& rounds);

}  // namespace outrider
