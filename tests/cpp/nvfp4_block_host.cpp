// The CUDA quantizer's number code behind a C interface, so that a test can run it without a GPU.
#include "../../csrc/cuda/divide_by.cuh"
#include "../../csrc/cuda/nvfp4_block.cuh"

extern "C" void quantize_blocks(const float* values, const float* gscale, int64_t blocks, uint32_t* codes,
                                uint8_t* scale) {
  for (int64_t block = 0; block < blocks; ++block) {
    float of_block[16];
    float amax = 0.0f;
    for (int i = 0; i < 16; ++i) {
      of_block[i] = values[block * 16 + i];
      amax = moeq::max_magnitude(amax, of_block[i]);
    }
    const moeq::Nvfp4Block quantized = moeq::nvfp4_quantize_block(of_block, amax, gscale[block]);
    codes[2 * block] = quantized.codes[0];
    codes[2 * block + 1] = quantized.codes[1];
    scale[block] = static_cast<uint8_t>(quantized.scale);
  }
}

extern "C" void dynamic_gscales(const float* amax, int64_t count, float* gscale) {
  for (int64_t i = 0; i < count; ++i) {
    gscale[i] = moeq::nvfp4_dynamic_gscale(moeq::bits_of(amax[i]));
  }
}

extern "C" void e4m3_codes(const float* numbers, int64_t count, uint8_t* codes, float* values) {
  for (int64_t i = 0; i < count; ++i) {
    const moeq::E4m3 rounded = moeq::e4m3_round(numbers[i]);
    codes[i] = static_cast<uint8_t>(rounded.code);
    values[i] = rounded.value;
  }
}

extern "C" void e2m1_words(const float* numbers, int64_t words, bool saturate, uint32_t* packed) {
  for (int64_t i = 0; i < words; ++i) {
    float magnitudes[8];
    for (int k = 0; k < 8; ++k) {
      magnitudes[k] = std::fabs(numbers[8 * i + k]);
    }
    packed[i] = moeq::sign_nibbles(numbers + 8 * i) |
                (saturate ? moeq::e2m1_pack8<true>(magnitudes) : moeq::e2m1_pack8<false>(magnitudes));
  }
}

extern "C" void quotients(const int32_t* dividends, int64_t count, int32_t divisor, int32_t* results) {
  const auto divide = moeq::DivideBy::of(static_cast<uint32_t>(divisor));
  for (int64_t i = 0; i < count; ++i) {
    results[i] = static_cast<int32_t>(divide(static_cast<uint32_t>(dividends[i])));
  }
}
