// Which tokens go to which expert, in tiles of tokens, and how a persistent kernel walks over them.
#pragma once
#include <cstdint>

namespace moeq::sm90 {

constexpr int kMaxExperts = 1024;

// One tile of tokens. Tiles of an expert are neighbours in the list, and hold `width` tokens each, the last one fewer.
struct TokenTile {
  int expert;
  int first;   // index of the expert's first tile
  int tiles;   // of the expert
  int start;   // the expert's first row, a multiple of 8
  int count;   // of the expert's rows
  int width;   // a multiple of 8
  int unused[2];
};

// Rows of operands are slots sorted by expert; an expert's rows begin at a multiple of 8, so that there are gaps.
struct Schedule {
  int* tiles_total;    // [1]
  int* rows_total;     // [1]
  int* next_item;      // [1]: of the persistent kernel
  int* finished;       // [experts]: pieces of GEMM1's work that are in memory
  int* first_row;      // [experts]
  int* rank;           // [slots]: among those of the expert; -1 where it is foreign
  int* slot_of_row;    // [max_rows]; undefined in gaps
  TokenTile* tiles;    // [max_token_tiles]
};

// Rows that any routing needs at most, a multiple of 8.
inline int max_rows(int slots, int experts) { return (slots + 7 * (slots < experts ? slots : experts) + 7) / 8 * 8; }

// What any routing needs at most: no tile but an expert's only one has fewer than 16 tokens, if tiles may have 32.
inline int max_token_tiles(int slots, int experts) { return (slots < experts ? slots : experts) + slots / 16; }

// A tile's time in multiples of what a token adds: below 48 the decoding of weights decides.
__host__ __device__ inline int tile_cost(int width) { return 12 + (width < 48 ? 48 : width); }

__host__ __device__ inline int tile_width(int count, int tiles) { return ((count + tiles - 1) / tiles + 7) / 8 * 8; }

// Into how many tiles of at most `max_width` an expert's tokens are best divided.
__host__ __device__ inline int tiles_for(int count, int max_width) {
  const int least = (count + max_width - 1) / max_width;
  int best = least;
  for (int tiles = least + 1; least > 1 && tiles <= least + 2; tiles++) {
    if (tiles * tile_cost(tile_width(count, tiles)) < best * tile_cost(tile_width(count, best))) best = tiles;
  }
  return best;
}

}  // namespace moeq::sm90
