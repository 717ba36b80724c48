// Passes over rows: operands from input and intermediate, and the weighted sum at the end.
#include <algorithm>
#include <cstring>

#include "chunk.h"

namespace moeq::cpu {

// Rows that make one task: handing a task to a thread must cost less than the work in it.
int64_t Chunk::task_rows(int64_t rows, int64_t size) const {
  const int64_t enough = std::max<int64_t>(1, 16384 / size);
  return std::max(enough, divide_up(rows, 8 * parallel_.threads));
}

int64_t Chunk::expert_of(int64_t slot) const {
  auto ends_after = [](int64_t value, const Segment& segment) { return value < segment.end; };
  return std::upper_bound(routing_.segments.begin(), routing_.segments.end(), slot, ends_after)->expert;
}

RowCall Chunk::row_call(const ActQuant& quant, const Operands& operands, int64_t row, int64_t size) const {
  RowCall call{};
  call.size = size;
  call.padded_size = padded16(size);
  call.quant = &quant;
  call.type = dot_.operand;
  call.operand = operands.data + row * operands.row_bytes;
  call.group_scales = operands.group_scales == nullptr ? nullptr : operands.group_scales + row * operands.groups;
  call.row_scale = operands.row_scale + row;
  call.sums = operands.sums_of(row);
  call.sum_units = operands.sum_units;
  return call;
}

void Chunk::quantize(RowCall call, int64_t expert, const float* values) const {
  const ActQuant& quant = *call.quant;
  if (quant.gscale != nullptr) call.gscale = quant.gscale[quant.gscale_count > 1 ? expert : 0];
  call.values = values;
  isa_.quantize_row(call);
}

// Zeros behind the row, up to its end in memory; and what the kernel wants of its rows besides.
void Chunk::finish_operand(const RowCall& call, const Operands& operands) const {
  if (tiled()) {
    const int64_t used = call.padded_size * bytes_of(call.type);
    std::memset(static_cast<uint8_t*>(call.operand) + used, 0, static_cast<size_t>(operands.row_bytes - used));
  }
  if (dot_.finish != nullptr) dot_.finish(call);
}

// The first slot of a token has its operand: copies for the others.
void Chunk::share_input(int64_t token) const {
  const int32_t* slots = routing_.positions.data() + token * args_.top_k;
  const int64_t made = first_slot(token);
  for (int64_t j = 0; j < args_.top_k; ++j) {
    if (slots[j] < 0 || slots[j] == made) continue;
    std::memcpy(input_.data + slots[j] * input_.row_bytes, input_.row(made), static_cast<size_t>(input_.row_bytes));
    input_.row_scale[slots[j]] = input_.row_scale[made];
    if (input_.group_scales != nullptr) {
      std::copy_n(input_.groups_of(made), input_.groups, input_.group_scales + slots[j] * input_.groups);
    }
    if (input_.sums != nullptr) std::copy_n(input_.sums_of(made), input_.sum_groups, input_.sums_of(slots[j]));
  }
}

int64_t Chunk::first_slot(int64_t token) const {
  const int32_t* slots = routing_.positions.data() + token * args_.top_k;
  const int32_t* found = std::find_if(slots, slots + args_.top_k, [](int32_t slot) { return slot >= 0; });
  return found == slots + args_.top_k ? -1 : *found;
}

void Chunk::make_input(int64_t row) const {
  const int64_t token = first_ + (per_slot_ ? routing_.tokens[static_cast<size_t>(row)] : row);
  const int64_t size = args_.hidden_size;
  const bool shared = tiled() && !per_slot_;
  const int64_t operand = shared ? first_slot(row) : row;
  if (operand < 0) return;
  const RowCall call = row_call(args_.a1, input_, operand, size);
  const uint8_t* source = args_.hidden + token * args_.hidden_row_bytes;
  if (args_.hidden_scale != nullptr) {
    isa_.load_packed_row(call, source, args_.hidden_scale + token * args_.hidden_scale_row_bytes);
  } else {
    const float* weight = args_.weight_on_input ? args_.topk_weights + token : nullptr;
    float* values = values_ + row * hidden_;
    isa_.load_row(source, args_.hidden_dtype, size, weight, values);
    quantize(call, per_slot_ ? expert_of(row) : 0, values);
  }
  finish_operand(call, input_);
  if (shared) share_input(row);
}

void Chunk::make_inputs(int64_t task) const {
  const int64_t rows = input_rows();
  const int64_t step = task_rows(rows, hidden_);
  for (int64_t row = task * step; row < std::min(rows, (task + 1) * step); ++row) make_input(row);
}

void Chunk::make_intermediates(int64_t task) const {
  const int64_t step = task_rows(slots_, inter_);
  for (int64_t slot = task * step; slot < std::min(slots_, (task + 1) * step); ++slot) {
    const RowCall call = row_call(args_.a2, intermediate_, slot, inter_);
    quantize(call, expert_of(slot), h_ + slot * inter_);
    finish_operand(call, intermediate_);
  }
}

void Chunk::combine(int64_t task) const {
  const int64_t step = task_rows(count_, hidden_);
  const int64_t element = args_.out_dtype == DType::kFloat32 ? 4 : 2;
  CombineCall call{};
  call.y = y_;
  call.y_stride = hidden_;
  call.top_k = args_.top_k;
  call.size = args_.hidden_size;
  call.dtype = args_.out_dtype;
  for (int64_t token = task * step; token < std::min(count_, (task + 1) * step); ++token) {
    call.positions = routing_.positions.data() + token * args_.top_k;
    call.weights = args_.weight_on_input ? nullptr : args_.topk_weights + (first_ + token) * args_.top_k;
    call.out = static_cast<uint8_t*>(args_.out) + (first_ + token) * args_.hidden_size * element;
    isa_.combine(call);
  }
}

}  // namespace moeq::cpu
