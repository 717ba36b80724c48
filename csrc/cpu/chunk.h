// One chunk of tokens on its way through the experts: five passes, each over independent tasks.
//   1. input rows -> operands             (per token, or per slot where experts have input scales of their own;
//                                          tiles read the rows of an expert one after the other, so that there a
//                                          token's row is copied to all of its slots)
//   2. GEMM 1, alphas, bias, activation   -> float32 intermediate, per (expert, panels)
//   3. intermediate rows -> operands      (a row scale may need the whole row: hence a pass of its own)
//   4. GEMM 2, alpha, bias                -> float32 y per slot, per (expert, panels)
//   5. out[t] = sum over j of weight * y, ascending j
#pragma once

#include <vector>

#include "isa.h"
#include "parallel.h"
#include "routing.h"
#include "workspace.h"

namespace moeq::cpu {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t padded16(int64_t n) { return divide_up(n, 16) * 16; }

// Operand rows of one GEMM.
struct Operands {
  uint8_t* data = nullptr;
  float* row_scale = nullptr;     // the factor that a row's accumulators are owed
  float* group_scales = nullptr;  // [rows, groups], where the format has groups
  int32_t* sums = nullptr;  // [rows, sum_groups], of the codes of each span (integer_spans.h), int8 operands only
  int64_t row_bytes = 0;
  int64_t groups = 0;
  int64_t sum_groups = 0;
  int64_t sum_units = 0;  // units of a group of weights

  const void* row(int64_t i) const { return data + i * row_bytes; }
  const float* groups_of(int64_t i) const { return group_scales == nullptr ? nullptr : group_scales + i * groups; }
  int32_t* sums_of(int64_t i) const { return sums == nullptr ? nullptr : sums + i * sum_groups; }
};

// Panels [begin, end) of one expert, for all of its slots.
struct PanelTask {
  const Segment* segment;
  int64_t begin;
  int64_t end;
};

// What a thread keeps from call to call, so that the next one allocates nothing.
struct Scratch {
  Workspace workspace;
  Routing routing;
  std::vector<PanelTask> first_tasks;
  std::vector<PanelTask> second_tasks;
};

class Chunk {
 public:
  Chunk(const ExpertsArgs& args, const IsaTable& isa, const Dot& dot, const Parallel& parallel, int64_t first,
        int64_t count, Scratch& scratch);

  void run();

 private:
  void allocate(Workspace& workspace);
  Operands take_operands(Workspace& workspace, int64_t rows, int64_t size, const ActQuant& quant,
                         const Weight& weight) const;

  // chunk_rows.cpp: each takes some rows
  void make_inputs(int64_t task) const;
  void make_intermediates(int64_t task) const;
  void combine(int64_t task) const;
  void make_input(int64_t row) const;
  void share_input(int64_t token) const;
  int64_t first_slot(int64_t token) const;
  void finish_operand(const RowCall& call, const Operands& operands) const;
  RowCall row_call(const ActQuant& quant, const Operands& operands, int64_t row, int64_t size) const;
  void quantize(RowCall call, int64_t expert, const float* values) const;
  int64_t task_rows(int64_t rows, int64_t size) const;
  int64_t expert_of(int64_t slot) const;

  // chunk_gemm.cpp: each takes some panels of one expert; `next`, if not null, is what the thread does then
  void first_gemm_panels(const PanelTask& task, const PanelTask* next) const;
  void second_gemm_panels(const PanelTask& task, const PanelTask* next) const;
  int64_t fewest_panels(const Segment& segment, int64_t panels, int64_t halves) const;
  void tell_later(TileCall& call, const Weight& weight, const PanelTask& task, int64_t behind,
                  const PanelTask* next) const;
  void split(int64_t panels, int64_t halves, std::vector<PanelTask>& tasks) const;
  DotCall dot_call(const Weight& weight, int64_t expert, int64_t panel, float* out) const;
  TileCall tile_call(const DotCall* panels, int num_panels, const Operands& operands, int64_t slot, int64_t end) const;
  GluCall glu_call(int64_t expert) const;
  void glu_rows(GluCall call, int64_t slot, int count, int64_t panel) const;
  void scale_rows(ScaleCall call, int64_t slot, int count, int64_t panel) const;
  void first_gemm_tiles(const PanelTask& task, const PanelTask* next) const;
  void second_gemm_tiles(const PanelTask& task, const PanelTask* next) const;

  bool tiled() const { return dot_.tile != nullptr; }
  int rows_at_once() const { return dot_.rows > 0 ? dot_.rows : isa_.tile; }
  bool takes_tiles(const Segment& segment) const { return tiled() && segment.end - segment.begin >= dot_.tile_rows; }
  // Panels of a tile call: of gate and up as many each.
  int64_t panels_at_once(const Segment& segment, int64_t halves) const {
    const int64_t rows = segment.end - segment.begin;
    if (rows <= dot_.few_rows) return kTileCallPanels;
    int64_t wanted = dot_.panels == nullptr ? 2 : dot_.panels(rows);
    if (wanted % halves != 0) wanted *= halves;
    return wanted * rows <= 2 * kTileCallRows ? wanted : 2;  // as many sums as there is room for
  }
  // Where a slot's operand lies; the row from which it is made.
  int64_t input_row(int64_t slot) const {
    return per_slot_ || tiled() ? slot : routing_.tokens[static_cast<size_t>(slot)];
  }
  int64_t input_rows() const { return per_slot_ ? slots_ : count_; }
  int64_t input_operands() const { return per_slot_ || tiled() ? slots_ : count_; }

  const ExpertsArgs& args_;
  const IsaTable& isa_;
  const Dot& dot_;
  const Parallel& parallel_;
  const int64_t first_;
  const int64_t count_;
  Scratch& scratch_;
  const Routing& routing_;
  const int64_t slots_;
  const int64_t inter_;  // padded to whole panels
  const int64_t hidden_;  // padded to whole panels
  const int64_t halves_;  // of w13: gate and up, or one
  const bool per_slot_;  // input operands belong to slots, not to tokens
  Operands input_;
  Operands intermediate_;
  float* values_ = nullptr;  // [input rows, hidden_], input in float32
  float* h_ = nullptr;  // [slots, inter_]
  float* y_ = nullptr;  // [slots, hidden_]
};

}  // namespace moeq::cpu
