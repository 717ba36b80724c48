// The two GEMM passes. A task streams some panels of one expert once, for all of that expert's slots.
#include <algorithm>

#include "chunk.h"

namespace moeq::cpu {
namespace {

// A task takes this part of what a thread would do of the work that is left.
constexpr int64_t kTaskParts = 8;
// A panel's weights cost as much as this many rows of products, by the times of layers whose weights come from memory.
constexpr int64_t kRowsOfAPanel = 2;
constexpr int64_t kFewRowPanels = 4;  // that few rows meet at a time
// A thread that has so many groups of them loses little where another one has one more.
constexpr int64_t kGroupsOfAThread = 16;

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

// Room for the accumulators of a tile call: two panels of many rows, or more panels of few.
struct TileSums {
  alignas(64) float values[2 * kTileCallRows * kPanelRows];

  // [rows, 16] of one of `count` panels.
  float* of(int panel, int count) { return values + panel * (2 * kTileCallRows / std::max(count, 2)) * kPanelRows; }
};

}  // namespace

// Panels that blocks and tiles take at once. Few rows meet more of them, where every thread has plenty to do.
int64_t Chunk::fewest_panels(const Segment& segment, int64_t panels, int64_t halves) const {
  if (!takes_tiles(segment)) return 1;
  if (segment.end - segment.begin > dot_.few_rows) return panels_at_once(segment, halves) / halves;
  const int64_t groups = static_cast<int64_t>(routing_.segments.size()) * panels * halves / kFewRowPanels;
  return (groups >= kGroupsOfAThread * parallel_.threads ? kFewRowPanels : 2) / halves;
}

// Long runs of panels first: one thread reads them without a break, and what it asks for ahead is its own. Short ones
// at the end, so that all threads are done at once.
void Chunk::split(int64_t panels, int64_t halves, std::vector<PanelTask>& tasks) const {
  const int64_t parts = parallel_.threads * kTaskParts;
  int64_t left = (slots_ + kRowsOfAPanel * static_cast<int64_t>(routing_.segments.size())) * panels;
  tasks.clear();
  for (const Segment& segment : routing_.segments) {
    const int64_t cost = segment.end - segment.begin + kRowsOfAPanel;
    const int64_t fewest = fewest_panels(segment, panels, halves);
    for (int64_t begin = 0; begin < panels;) {
      const int64_t wanted = std::max(left / (parts * cost), fewest);
      const int64_t even = divide_up(panels - begin, divide_up(panels - begin, wanted));
      const int64_t end = std::min(panels, begin + divide_up(even, fewest) * fewest);
      tasks.push_back({&segment, begin, end});
      left -= (end - begin) * cost;
      begin = end;
    }
  }
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

GluCall Chunk::glu_call(int64_t expert) const {
  GluCall call{};
  call.gate_alpha = alpha(args_.w13, expert, 0);
  call.up_alpha = alpha(args_.w13, expert, halves_ - 1);
  call.activation = args_.activation;
  call.alpha = args_.alpha;
  call.beta = args_.beta;
  call.limit = args_.limit;
  return call;
}

// `call` has the accumulators of slots [slot, slot + count), at most kMaxTile.
void Chunk::glu_rows(GluCall call, int64_t slot, int count, int64_t panel) const {
  call.count = count;
  for (int i = 0; i < count; ++i) {
    call.row_scales[i] = input_.row_scale + input_row(slot + i);
    call.rows[i] = h_ + (slot + i) * inter_ + panel * kPanelRows;
  }
  isa_.glu(call);
}

void Chunk::scale_rows(ScaleCall call, int64_t slot, int count, int64_t panel) const {
  call.count = count;
  for (int i = 0; i < count; ++i) {
    call.row_scales[i] = intermediate_.row_scale + slot + i;
    call.rows[i] = y_ + (slot + i) * hidden_ + panel * kPanelRows;
  }
  isa_.scale(call);
}

void Chunk::first_gemm_panels(const PanelTask& task, const PanelTask* next) const {
  if (takes_tiles(*task.segment)) return first_gemm_tiles(task, next);
  const Weight& w13 = args_.w13;
  const int64_t expert = task.segment->expert;
  alignas(64) float acc[2][kMaxTile * kPanelRows];
  PanelBias gate_bias;
  PanelBias up_bias;
  GluCall glu = glu_call(expert);
  glu.gate = halves_ == 2 ? acc[0] : nullptr;
  glu.up = acc[1];
  for (int64_t panel = task.begin; panel < task.end; ++panel) {
    const int64_t last = halves_ * panel + halves_ - 1;  // gate and up panels alternate
    DotCall gate = dot_call(w13, expert, halves_ * panel, acc[0]);
    DotCall up = dot_call(w13, expert, last, acc[1]);
    glu.gate_bias = gate_bias.load(w13, expert, halves_, 0, panel);
    glu.up_bias = up_bias.load(w13, expert, halves_, halves_ - 1, panel);
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += rows_at_once()) {
      const int count = static_cast<int>(std::min<int64_t>(rows_at_once(), task.segment->end - slot));
      gate.count = up.count = count;
      for (int i = 0; i < count; ++i) {
        const int64_t row = input_row(slot + i);
        gate.rows[i] = up.rows[i] = input_.row(row);
        gate.row_scales[i] = up.row_scales[i] = input_.groups_of(row);
        gate.row_sums[i] = up.row_sums[i] = input_.sums_of(row);
      }
      if (halves_ == 2) dot_.fn(gate);
      dot_.fn(up);
      glu_rows(glu, slot, count, panel);
    }
  }
}

void Chunk::second_gemm_panels(const PanelTask& task, const PanelTask* next) const {
  if (takes_tiles(*task.segment)) return second_gemm_tiles(task, next);
  const int64_t expert = task.segment->expert;
  alignas(64) float acc[kMaxTile * kPanelRows];
  PanelBias bias;
  ScaleCall scale{};
  scale.acc = acc;
  scale.alpha = alpha(args_.w2, expert, 0);
  for (int64_t panel = task.begin; panel < task.end; ++panel) {
    DotCall call = dot_call(args_.w2, expert, panel, acc);
    scale.bias = bias.load(args_.w2, expert, 1, 0, panel);
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += rows_at_once()) {
      call.count = static_cast<int>(std::min<int64_t>(rows_at_once(), task.segment->end - slot));
      for (int i = 0; i < call.count; ++i) {
        call.rows[i] = intermediate_.row(slot + i);
        call.row_scales[i] = intermediate_.groups_of(slot + i);
        call.row_sums[i] = intermediate_.sums_of(slot + i);
      }
      dot_.fn(call);
      scale_rows(scale, slot, call.count, panel);
    }
  }
}

TileCall Chunk::tile_call(const DotCall* panels, int num_panels, const Operands& operands, int64_t slot,
                          int64_t end) const {
  TileCall call{};
  call.panels = panels;
  call.num_panels = num_panels;
  call.rows = static_cast<const uint8_t*>(operands.row(slot));
  call.row_bytes = operands.row_bytes;
  call.count = static_cast<int>(std::min<int64_t>(kTileCallRows, end - slot));
  call.group_scales = operands.groups_of(slot);
  call.groups = operands.groups;
  call.row_sums = operands.sums_of(slot);
  call.sum_groups = operands.sum_groups;
  return call;
}

// Where weights lie behind those of a call that ends before panel `behind`: in this task, or where the next one begins.
void Chunk::tell_later(TileCall& call, const Weight& weight, const PanelTask& task, int64_t behind,
                       const PanelTask* next) const {
  const bool ends = behind >= task.end;
  if (ends && next == nullptr) return;
  const Segment& segment = ends ? *next->segment : *task.segment;
  const DotCall later = dot_call(weight, segment.expert, weight.halves * (ends ? next->begin : behind), nullptr);
  call.later_codes = later.codes;
  call.later_scale = later.scale;
}

void Chunk::first_gemm_tiles(const PanelTask& task, const PanelTask* next) const {
  const Weight& w13 = args_.w13;
  const int64_t expert = task.segment->expert;
  const int halves = static_cast<int>(halves_);
  const int64_t step = panels_at_once(*task.segment, halves_) / halves;
  TileSums sums;
  PanelBias gate_bias;
  PanelBias up_bias;
  GluCall glu = glu_call(expert);
  for (int64_t first = task.begin; first < task.end; first += step) {
    const int count = static_cast<int>(std::min(step, task.end - first)) * halves;
    DotCall panels[kTileCallPanels];
    for (int i = 0; i < count; ++i) panels[i] = dot_call(w13, expert, halves * first + i, sums.of(i, count));
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += kTileCallRows) {
      TileCall call = tile_call(panels, count, input_, slot, task.segment->end);
      call.results = h_ + slot * inter_ + first * kPanelRows;
      call.result_stride = inter_;
      call.result_panels = count / halves;
      tell_later(call, w13, task, first + step, next);
      dot_.tile(call);
      for (int i = 0; i < count; i += halves) {
        const int64_t panel = first + i / halves;
        glu.gate_bias = gate_bias.load(w13, expert, halves, 0, panel);
        glu.up_bias = up_bias.load(w13, expert, halves, halves - 1, panel);
        for (int row = 0; row < call.count; row += kMaxTile) {
          glu.gate = halves == 2 ? panels[i].out + row * kPanelRows : nullptr;
          glu.up = panels[i + halves - 1].out + row * kPanelRows;
          glu_rows(glu, slot + row, std::min(kMaxTile, call.count - row), panel);
        }
      }
    }
  }
}

void Chunk::second_gemm_tiles(const PanelTask& task, const PanelTask* next) const {
  const int64_t expert = task.segment->expert;
  const int64_t step = panels_at_once(*task.segment, 1);
  TileSums sums;
  PanelBias bias;
  ScaleCall scale{};
  scale.alpha = alpha(args_.w2, expert, 0);
  for (int64_t first = task.begin; first < task.end; first += step) {
    const int count = static_cast<int>(std::min(step, task.end - first));
    DotCall panels[kTileCallPanels];
    for (int i = 0; i < count; ++i) panels[i] = dot_call(args_.w2, expert, first + i, sums.of(i, count));
    for (int64_t slot = task.segment->begin; slot < task.segment->end; slot += kTileCallRows) {
      TileCall call = tile_call(panels, count, intermediate_, slot, task.segment->end);
      call.results = y_ + slot * hidden_ + first * kPanelRows;
      call.result_stride = hidden_;
      call.result_panels = count;
      tell_later(call, args_.w2, task, first + step, next);
      dot_.tile(call);
      for (int i = 0; i < count; ++i) {
        scale.bias = bias.load(args_.w2, expert, 1, 0, first + i);
        for (int row = 0; row < call.count; row += kMaxTile) {
          scale.acc = panels[i].out + row * kPanelRows;
          scale_rows(scale, slot + row, std::min(kMaxTile, call.count - row), first + i);
        }
      }
    }
  }
}

}  // namespace moeq::cpu
