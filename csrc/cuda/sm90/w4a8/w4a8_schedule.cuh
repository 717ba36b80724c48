// Which rows of the token operand belong to which expert, and in which tiles they are multiplied.
//
// The operand holds the rows of an expert together, their number rounded up to 8: [k tiles, rows, 128 bytes], swizzled
// as wgmma reads it, so that any tile of tokens is one bulk copy.
#pragma once
#include "../launch/launches.h"
#include "../prefill/schedule.cuh"
#include "../problem/tiled_problem.h"
#include "../layout/w4a8_layout.h"

namespace moeq::sm90::w4a8 {

constexpr int kMaxWidth = 256;      // tokens of a tile
constexpr int kMaxSingle = 160;     // up to here one instruction spans the tile

struct TokenTile {
  int expert;
  int first;    // index of the expert's first tile
  int tiles;    // of the expert
  int start;    // of the expert's rows in the operand
  int count;    // of its tokens
  int width;    // of the tiles: a width that the kernels have
  int unused[2];
};

// Where a row lies: itself, and the rows of its expert, their number rounded up to 8.
struct Place {
  int row;      // -1: nobody's
  int expert;
  int start, rows;
};

struct Schedule {
  int* tiles_total;    // [1]
  int* next_item;      // [2]: of the GEMMs
  int* start;          // [experts + 1]: first row, a multiple of 8
  int* count;          // [experts]
  SlotRank* rank;      // [slots]
  int* slot_of_row;    // [rows]; -1: nobody's. Written when tokens are quantized, but for the -1
  Place* place_of_row; // [rows], likewise
  TokenTile* tiles;    // [max_tiles]
};

__host__ __device__ inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

inline int least_of(int a, int b) { return a < b ? a : b; }
inline int max_rows(int slots, int experts) { return round_up(slots + 7 * least_of(slots, experts), 8); }
// An expert's tiles hold at least 80 tokens each unless it has only one.
inline int max_tiles(int slots, int experts) { return least_of(slots, experts) + slots / 80; }

__host__ __device__ inline int round_width(int tokens) {
  return tokens <= 96 || tokens > kMaxSingle ? round_up(tokens, 16) : round_up(tokens, 8);
}

__host__ __device__ inline int tile_width(int count, int tiles) { return round_width((count + tiles - 1) / tiles); }

// Tile after tile: what its tokens cost, but no less than decoding the weights does, and some time between tiles.
__host__ __device__ inline int tiles_cost(int count, int tiles) {
  const int width = tile_width(count, tiles);
  return tiles * (16 + (width < 64 ? 64 : width));
}

// Tiles of at most `widest` tokens.
__host__ __device__ inline int tiles_for(int count, int widest) {
  const int least = (count + widest - 1) / widest;
  return least > 1 && tiles_cost(count, least + 1) < tiles_cost(count, least) ? least + 1 : least;
}

cudaError_t launch_schedule(const W4a8Problem& p, const Schedule& schedule, int widest);

}  // namespace moeq::sm90::w4a8
