// The two GEMM passes. A task streams some panels of one expert once, for all of that expert's slots.
#include <algorithm>

#include "chunk.h"

namespace moeq::cpu {
namespace {

constexpr int64_t kTasksPerThread = 24;
constexpr int64_t kMaxPanelsPerTask = 8;

float alpha(const Weight& weight, int64_t expert, int64_t half) {
  if (weight.alphas == nullptr) return 1.0f;
  return weight.alphas[expert * weight.alpha_columns + (weight.alpha_columns > 1 ? half : 0)];
}

// Sixteen biases of one panel; rows that only pad the panel get zero.
struct PanelBias {
  alignas(64) float values[kPanelRows];

  const float* load(const Weight& weight, int64_t expert, int64_t halves, int64_t half, int64_t panel) {
    if (weight.bias == nullptr) return nullptr;
    const float* first = weight.bias + (expert * halves + half) * weight.bias_rows;
    for (int64_t i = 0; i < kPanelRows; ++i) {
      const int64_t row = panel * kPanelRows + i;
      values[i] = row < weight.bias_rows ? first[row] : 0.0f;
    }
    return values;
  }
};

}  // namespace

std::vector<PanelTask> Chunk::split(int64_t panels) const {
  const int64_t segments = static_cast<int64_t>(routing_.segments.size());
  const int64_t wanted = segments * panels / (parallel_.threads * kTasksPerThread);
  const int64_t step = std::clamp<int64_t>(wanted, 1, kMaxPanelsPerTask);
  std::vector<PanelTask> tasks;
  tasks.reserve(static_cast<size_t>(segments * divide_up(panels, step)));
  for (const Segment& segment : routing_.segments) {
    for (int64_t begin = 0; begin < panels; begin += step) {
      tasks.push_back({&segment, begin, std::min(panels, begin + step)});
    }
  }
  return tasks;
}

DotCall Chunk::dot_call(const Weight& weight, int64_t expert, int64_t panel, float* out) const {
  DotCall call{};
  const int64_t index = expert * weight.panels + panel;
  call.codes = weight.codes + index * weight.panel_bytes;
  if (weight.scale != nullptr) {
    // Scales of gate and up alternate like their panels.
    const int64_t row = panel / weight.halves / weight.scale_panels * weight.halves + panel % weight.halves;
    call.scale = weight.scale + expert * weight.expert_scale_bytes + row * weight.panel_scale_bytes;
  }
  if (weight.zero_point != nullptr) call.zero_point = weight.zero_point + index * weight.panel_zero_bytes;
  call.units = weight.units;
  call.group_units = weight.group_units;
  call.out = out;
  return call;
}

void Chunk::first_gemm_panels(const PanelTask& task) const {
  const Weight& w13 = args_.w13;
  const int64_t expert = task.segment->expert;
  const int64_t halves = is_gated(args_.activation) ? 2 : 1;
  alignas(64) float acc[2][kMaxTile * kPanelRows];
  PanelBias gate_bias;
  PanelBias up_bias;
  GluCall glu{};
  glu.gate = halves == 2 ? acc[0] : nullptr;
  glu.up = acc[1];
  glu.gate_alpha = alpha(w13, expert, 0);
  glu.up_alpha = alpha(w13, expert, halves - 1);
  glu.activation = args_.activation;
  glu.alpha = args_.alpha;
  glu.beta = args_.beta;
  glu.limit = args_.limit;
  for (int64_t panel = task.begin; panel < task.end; ++panel) {
    const int64_t last = halves * panel + halves - 1;  // gate and up panels alternate
    DotCall gate = dot_call(w13, expert, halves * panel, acc[0]);
    DotCall up = dot_call(w13, expert, last, acc[1]);
    glu.gate_bias = gate_bias.load(w13, expert, halves, 0, panel);
    glu.up_bias = up_bias.load(w13, expert, halves, halves - 1, panel);
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += isa_.tile) {
      const int count = static_cast<int>(std::min<int64_t>(isa_.tile, task.segment->end - slot));
      gate.count = up.count = glu.count = count;
      for (int i = 0; i < count; ++i) {
        const int64_t row = input_row(slot + i);
        gate.rows[i] = up.rows[i] = input_.row(row);
        gate.row_scales[i] = up.row_scales[i] = input_.groups_of(row);
        glu.row_scales[i] = input_.row_scale + row;
        glu.rows[i] = h_ + (slot + i) * inter_ + panel * kPanelRows;
      }
      if (halves == 2) dot_.fn(gate);
      dot_.fn(up);
      isa_.glu(glu);
    }
  }
}

void Chunk::second_gemm_panels(const PanelTask& task) const {
  const int64_t expert = task.segment->expert;
  alignas(64) float acc[kMaxTile * kPanelRows];
  PanelBias bias;
  ScaleCall scale{};
  scale.acc = acc;
  scale.alpha = alpha(args_.w2, expert, 0);
  for (int64_t panel = task.begin; panel < task.end; ++panel) {
    DotCall call = dot_call(args_.w2, expert, panel, acc);
    scale.bias = bias.load(args_.w2, expert, 1, 0, panel);
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += isa_.tile) {
      call.count = scale.count = static_cast<int>(std::min<int64_t>(isa_.tile, task.segment->end - slot));
      for (int i = 0; i < call.count; ++i) {
        call.rows[i] = intermediate_.row(slot + i);
        call.row_scales[i] = intermediate_.groups_of(slot + i);
        scale.row_scales[i] = intermediate_.row_scale + slot + i;
        scale.rows[i] = y_ + (slot + i) * hidden_ + panel * kPanelRows;
      }
      dot_.fn(call);
      isa_.scale(scale);
    }
  }
}

}  // namespace moeq::cpu
