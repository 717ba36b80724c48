// Which tokens go to which expert, in tiles of tokens, and how a persistent kernel walks over them.
#pragma once
#include <cstdint>

#include "../../../generated/sm90.h"

namespace moeq::sm90 {

// One tile of tokens. Tiles of an expert are neighbours in the list; their widths differ by 8 at most, so that no more
// than the expert's last 7 tokens are multiplied in vain.
struct TokenTile {
  int expert;
  int first;   // index of the expert's first tile
  int tiles;   // of the expert
  int start;   // the first row, a multiple of 8
  int rows;
  int width;   // rows rounded up to a multiple of 8
  int unused[2];
};

// Where a slot is. Ids are read once: whoever read them again could find others, and write beyond a row's end.
struct alignas(8) SlotRank {
  int expert;   // -1: foreign
  int rank;     // among the slots of the expert
};

// Rows of operands are slots sorted by expert; an expert's rows begin at a multiple of 8, so that there are gaps.
struct Schedule {
  int* tiles_total;    // [1]
  int* rows_total;     // [1]
  int* next_item;      // [1]: of the persistent kernel
  int* finished;       // [experts]: pieces of GEMM1's work that are in memory
  int* first_row;      // [experts]
  int* overdue;        // [1]: whether a wait of the persistent kernel was too long, for who comes last to tell it
  SlotRank* rank;      // [slots]
  int* slot_of_row;    // [max_rows]; undefined in gaps
  TokenTile* tiles;    // [max_token_tiles]
};

// Rows that any routing needs at most, a multiple of 8.
inline int max_rows(int slots, int experts) { return (slots + 7 * (slots < experts ? slots : experts) + 7) / 8 * 8; }

// What any routing needs at most: no tile but an expert's only one has fewer than 16 tokens, if tiles may have 32.
inline int max_token_tiles(int slots, int experts) { return (slots < experts ? slots : experts) + slots / 16; }

// Into how many tiles of at most `max_width` an expert's tokens are divided: each decodes the weights anew.
__host__ __device__ inline int tiles_for(int count, int max_width) { return (count + max_width - 1) / max_width; }

}  // namespace moeq::sm90
