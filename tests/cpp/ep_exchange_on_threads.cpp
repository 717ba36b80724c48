// Random exchanges between ranks of transport "p2p", on the CPU: usage: PROGRAM SEED CALLS. Status 1: a wrong byte.
//
// Every rank makes its calls one after the other, without waiting for the others but in the kernels; many rows with
// flags, few of them also as words. Counters start just before or long after they pass 2^32. Built by
// tests/expert_parallel/test_p2p_protocol.py, which adapts the headers.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "cuda_on_threads.h"
//
#include "combine.cuh"
#include "dispatch.cuh"
#include "remote.cuh"

using namespace moeq::ep;

namespace {

constexpr uint64_t kLimit = 5'000'000'000;  // ns
constexpr uint32_t kRenewalOfTest = 4;  // or more, where a test shows that it must not be
constexpr uint8_t kUntouched = 0xee;

struct Call {
  int rows, top_k, hidden, scale_bytes;
  std::vector<int> tokens;  // of each rank
  bool words;               // where they fit
  bool fit(int64_t vectors) const { return words && vectors <= kWordBlocks * kWordThreads; }
};

uint8_t byte_of_row(int call, int rank, int segment, int64_t i) {
  return static_cast<uint8_t>(call * 131 + rank * 37 + segment * 17 + i * 7 + (i >> 8) * 3);
}

float partial_value(int call, int rank, int64_t i) {
  return static_cast<float>((call * 13 + rank * 7 + i % 101) % 64) / 8 - 3.0f;
}

template <class Args, class Kernel>
void launch(const Args& args, unsigned of_blocks, unsigned of_threads, Kernel kernel) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Block>> blocks;
  for (unsigned b = 0; b < of_blocks; ++b) {
    blocks.push_back(std::make_unique<Block>(of_threads));
    for (unsigned t = 0; t < of_threads; ++t) {
      threads.emplace_back([&args, kernel, b, t, of_blocks, of = blocks.back().get()] {
        threadIdx.x = t;
        blockIdx.x = b;
        gridDim.x = of_blocks;
        block = of;
        be_late();
        kernel(args);
      });
    }
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

unsigned word_blocks(int64_t vectors) { return static_cast<unsigned>((vectors + kWordThreads - 1) / kWordThreads); }

int64_t wrong_dispatch(const Call& call, int number, Ranks ranks) {
  const int64_t row_bytes[kSegments] = {call.top_k * 4, call.top_k * 4, call.hidden * 2, call.scale_bytes};
  std::vector<std::vector<uint8_t>> given(kSegments), received(kSegments);
  DispatchArgs args{{}, ranks, Share(1, 1), static_cast<uint32_t>(call.tokens[ranks.rank])};
  int64_t vectors = 0;
  for (int s = 0; s < kSegments; ++s) {
    const int64_t bytes = args.tokens * row_bytes[s], part = call.rows * row_bytes[s];
    given[s].resize(bytes + 16);
    for (int64_t i = 0; i < bytes; ++i) {
      given[s][i] = byte_of_row(number, ranks.rank, s, i);
    }
    received[s].assign(ranks.size * part + 16, kUntouched);
    args.segments[s] = {given[s].data(), received[s].data(), row_bytes[s], part, vectors, s == 0 ? 0xffffffffu : 0};
    vectors += (part + 15) / 16;
  }
  args.share = Share(vectors, kStepVectors);
  if (call.fit(vectors)) {
    launch(args, word_blocks(vectors), kWordThreads, [](const DispatchArgs& a) { dispatch_words_kernel<8>(a); });
  } else {
    launch(args, args.share.blocks(), kBlockThreads, [](const DispatchArgs& a) { dispatch_kernel(a); });
  }
  int64_t wrong = 0;
  for (int s = 0; s < kSegments; ++s) {
    const int64_t part = call.rows * row_bytes[s];
    for (int64_t i = 0; i < ranks.size * part + 16; ++i) {
      const int rank = part ? static_cast<int>(i / part) : ranks.size;
      uint8_t want = s == 0 ? 0xff : 0;
      if (rank >= ranks.size) {
        want = kUntouched;
      } else if (i % part < call.tokens[rank] * row_bytes[s]) {
        want = byte_of_row(number, rank, s, i % part);
      }
      wrong += received[s][i] != want;
    }
  }
  return wrong;
}

template <int most_ranks>
void launch_combine(CombineArgs args, int64_t vectors, bool words) {
  args.share = Share(vectors, Step<most_ranks>::kVectors);
  if (words) {
    launch(args, word_blocks(vectors), kWordThreads,
           [](const CombineArgs& a) { combine_words_kernel<moeq::Float32, most_ranks>(a); });
  } else {
    launch(args, args.share.blocks(), kBlockThreads,
           [](const CombineArgs& a) { combine_kernel<moeq::Float32, most_ranks>(a); });
  }
}

int64_t wrong_combine(const Call& call, int number, Ranks ranks) {
  const int64_t part = static_cast<int64_t>(call.rows) * call.hidden, mine = call.tokens[ranks.rank] * call.hidden;
  std::vector<float> partial(ranks.size * part), out(mine + 8, -99.0f);
  for (size_t i = 0; i < partial.size(); ++i) {
    partial[i] = partial_value(number, ranks.rank, static_cast<int64_t>(i));
  }
  const CombineArgs args{reinterpret_cast<uint4*>(partial.data()), out.data(), mine, Out::kFloat32, ranks, Share(1, 1)};
  const int64_t vectors = part / 4;
  const bool words = call.fit(vectors);
  ranks.size <= 2   ? launch_combine<2>(args, vectors, words)
  : ranks.size <= 4 ? launch_combine<4>(args, vectors, words)
                    : launch_combine<8>(args, vectors, words);
  int64_t wrong = 0;
  for (int64_t i = 0; i < mine + 8; ++i) {
    float want = i < mine ? 0.0f : -99.0f;
    for (int rank = 0; i < mine && rank < ranks.size; ++rank) {
      want += partial_value(number, rank, ranks.rank * part + i);
    }
    wrong += out[i] != want;
  }
  return wrong;
}

constexpr int kMostRows = 9, kMostTopK = 8, kMostHidden = 320, kPlacesOfRank = 3;
constexpr int64_t kTokenBytes = int64_t{kMostRows} * kMostHidden * 4;
constexpr int64_t kSlotBytes = int64_t{kMostRanks} * kMostRows * kMostTopK * 4;
constexpr int64_t kHeapBytes = kTokenBytes + 2 * kSlotBytes + kMostRanks * kTokenBytes;

int32_t place_of_slot(int call, int rank, int size, int64_t slot) {
  return static_cast<int32_t>((call * 7 + rank * 5 + slot * 3 + slot / 5) % (kPlacesOfRank * size + 1)) - 1;
}

// What experts do between the kernels: this rank's, on the tokens of all ranks.
int64_t wrong_experts(const Call& call, int number, const Heaps& heaps, const Ranks& ranks) {
  const auto* places = reinterpret_cast<const int32_t*>(heaps.addresses[ranks.rank] + heaps.places_at);
  const auto* weights = reinterpret_cast<const float*>(heaps.addresses[ranks.rank] + heaps.weights_at);
  int64_t wrong = 0;
  for (int64_t row = 0; row < call.rows; ++row) {
    for (int from = 0; from < ranks.size; ++from) {
      bool mine = false;
      for (int j = 0; j < call.top_k; ++j) {
        const int64_t at = (row * ranks.size + from) * call.top_k + j, slot = row * call.top_k + j;
        const bool real = row < call.tokens[from];
        const int32_t want = real ? place_of_slot(number, from, ranks.size, slot) : -1;
        wrong += places[at] != want || weights[at] != (real ? partial_value(number, from, slot) : 0.0f);
        mine |= want >= 0 && want / kPlacesOfRank == ranks.rank;
      }
      const auto* token = reinterpret_cast<const float*>(heaps.addresses[from]) + row * call.hidden;
      auto* part = reinterpret_cast<float*>(heaps.addresses[from] + heaps.parts_at) +
                   (static_cast<int64_t>(ranks.rank) * call.rows + row) * call.hidden;
      be_late();
      for (int i = 0; mine && i < call.hidden; ++i) {
        wrong += token[i] != partial_value(number, from, row * call.hidden + i);
        part[i] = partial_value(number + 1, ranks.rank, row * call.hidden + i);
      }
    }
  }
  return wrong;
}

int64_t wrong_remote(const Call& call, int number, const Ranks& ranks, const std::vector<int64_t>& addresses) {
  const int64_t tokens = call.tokens[ranks.rank], slots = tokens * call.top_k, values = tokens * call.hidden;
  std::vector<float> x(values + 4), weights(slots + 4), out(values + 8, -99.0f);
  std::vector<int32_t> ids(slots + 4), places(slots + 4);
  for (int64_t i = 0; i < values; ++i) {
    x[i] = partial_value(number, ranks.rank, i);
  }
  for (int64_t i = 0; i < slots; ++i) {
    ids[i] = place_of_slot(number, ranks.rank, ranks.size, i);
    weights[i] = partial_value(number, ranks.rank, i);
  }
  Heaps heaps{{}, kTokenBytes, kTokenBytes + kSlotBytes, kTokenBytes + 2 * kSlotBytes};
  std::copy(addresses.begin(), addresses.end(), heaps.addresses);
  const StageArgs stage{reinterpret_cast<uint4*>(x.data()),
                        values / 4,
                        ids.data(),
                        weights.data(),
                        places.data(),
                        static_cast<int>(tokens),
                        call.rows,
                        call.top_k,
                        heaps,
                        ranks,
                        {}};
  launch(stage, kBlocks, kRemoteThreads, [](const StageArgs& a) { stage_kernel(a); });
  int64_t wrong = wrong_experts(call, number, heaps, ranks);
  SumArgs sum{places.data(), out.data(), Out::kFloat32,   static_cast<int>(tokens),
              call.rows,     call.top_k, call.hidden / 4, {},
              heaps,         ranks};
  for (int rank = 0; rank < ranks.size; ++rank) {
    sum.ends[rank] = kPlacesOfRank * (rank + 1);
  }
  launch(sum, kBlocks, kRemoteThreads, [](const SumArgs& a) { sum_kernel<moeq::Float32, 8>(a); });
  for (int64_t i = 0; i < values + 8; ++i) {
    float want = i < values ? 0.0f : -99.0f;
    for (int rank = 0; i < values && rank < ranks.size; ++rank) {
      bool given = false;
      for (int j = 0; j < call.top_k; ++j) {
        const int32_t place = place_of_slot(number, ranks.rank, ranks.size, i / call.hidden * call.top_k + j);
        given |= place >= 0 && place / kPlacesOfRank == rank;
      }
      want += given ? partial_value(number + 1, rank, i) : 0.0f;
    }
    wrong += out[i] != want;
  }
  return wrong;
}

}  // namespace

int main(int, char** argv) {
  std::mt19937 random(std::atoi(argv[1]));
  const auto below = [&random](int n) { return static_cast<int>(random() % n); };
  const int size = 2 + below(4), number_of_calls = std::atoi(argv[2]);
  std::vector<Buffer*> buffers;
  std::vector<int64_t> addresses;
  const bool wraps = below(2);
  for (int rank = 0; rank < size; ++rank) {
    buffers.push_back(new (std::align_val_t{alignof(Buffer)}) Buffer{});
    addresses.push_back(reinterpret_cast<int64_t>(buffers.back()));
    for (auto& of_phase : buffers.back()->rounds) {
      for (auto& round : of_phase) {
        round = wraps ? 0xfffffff8u : 0;
      }
    }
    for (auto& round : buffers.back()->word_rounds) {
      round = wraps ? 0u - kRenewalOfTest - 1 : 0;
    }
    if (wraps) {  // words of 2^32 rounds ago, which look like those of rounds 0 and 1
      auto* words = reinterpret_cast<uint64_t*>(buffers.back()->words);
      const size_t of_slot = sizeof(buffers.back()->words) / sizeof(uint64_t) / kWordSlots;
      for (size_t i = 0; i < of_slot * kWordSlots; ++i) {
        words[i] = static_cast<uint64_t>(i / of_slot) << 32 | 0xabababab;
      }
    }
  }
  std::vector<std::vector<uint4>> heaps(size, std::vector<uint4>(kHeapBytes / sizeof(uint4)));
  std::vector<int64_t> heap_addresses;
  for (auto& heap : heaps) {
    heap_addresses.push_back(reinterpret_cast<int64_t>(heap.data()));
  }
  std::vector<Call> calls;
  for (int c = 0; c < number_of_calls; ++c) {
    const bool few = below(2);
    Call call{1 + below(few ? 2 : 9), 1 + below(8), 8 * (1 + below(few ? 4 : 40)), below(3) ? 1 + below(20) : 0, {}};
    call.words = below(4);
    for (int rank = 0; rank < size; ++rank) {
      call.tokens.push_back(below(call.rows + 1));
    }
    calls.push_back(call);
  }
  std::atomic<int64_t> wrong = 0;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      for (int c = 0; c < number_of_calls; ++c) {
        Ranks group{{}, rank, size, kLimit};
        std::copy(addresses.begin(), addresses.end(), group.buffers);
        wrong += wrong_dispatch(calls[c], c, group);
        wrong += wrong_combine(calls[c], c, group);
        for (int again = 0; again <= c % 3; ++again) {
          wrong += wrong_remote(calls[(c + again) % number_of_calls], c + again, group, heap_addresses);
        }
      }
    });
  }
  for (auto& rank : ranks) {
    rank.join();
  }
  std::printf("%d ranks, %lld wrong\n", size, static_cast<long long>(wrong));
  return wrong != 0;
}
