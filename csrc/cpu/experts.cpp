#include "experts.h"

#include <algorithm>

#include "chunk.h"
#include "integer_spans.h"

namespace moeq::cpu {
namespace {

// So many tasks a thread, the last and shortest ones of a pass, are drawn when they are done: by whoever is free.
constexpr int64_t kNotDrawnAhead = 4;

}  // namespace

Chunk::Chunk(const ExpertsArgs& args, const IsaTable& isa, const Dot& dot, const Parallel& parallel, int64_t first,
             int64_t count, Scratch& scratch)
    : args_(args),
      isa_(isa),
      dot_(dot),
      parallel_(parallel),
      first_(first),
      count_(count),
      scratch_(scratch),
      routing_(group_by_expert(args, first, count, scratch.routing)),
      slots_(static_cast<int64_t>(routing_.tokens.size())),
      inter_(args.w2.units * kUnit),
      hidden_(padded16(args.hidden_size)),
      halves_(is_gated(args.activation) ? 2 : 1),
      per_slot_(args.a1.gscale != nullptr && args.a1.gscale_count > 1 && args.hidden_scale == nullptr) {}

void Chunk::run() {
  allocate(scratch_.workspace);
  split(inter_ / kPanelRows, halves_, scratch_.first_tasks);
  split(hidden_ / kPanelRows, 1, scratch_.second_tasks);
  auto row_tasks = [&](int64_t rows, int64_t size) { return divide_up(rows, task_rows(rows, size)); };
  Pass passes[5];
  auto set = [&](int i, int64_t tasks, void (*body)(const void*, int64_t, int64_t)) {
    passes[i].tasks = tasks;
    passes[i].body = body;
    passes[i].context = this;
  };
  // Nothing but zeros to combine where no slot is ours.
  set(0, slots_ > 0 ? row_tasks(input_rows(), hidden_) : 0,
      [](const void* chunk, int64_t task, int64_t) { static_cast<const Chunk*>(chunk)->make_inputs(task); });
  set(1, static_cast<int64_t>(scratch_.first_tasks.size()), [](const void* chunk, int64_t task, int64_t next) {
    const Chunk& self = *static_cast<const Chunk*>(chunk);
    const PanelTask* tasks = self.scratch_.first_tasks.data();
    self.first_gemm_panels(tasks[task], next == kNoTask ? nullptr : tasks + next);
  });
  set(2, slots_ > 0 ? row_tasks(slots_, inter_) : 0,
      [](const void* chunk, int64_t task, int64_t) { static_cast<const Chunk*>(chunk)->make_intermediates(task); });
  set(3, static_cast<int64_t>(scratch_.second_tasks.size()), [](const void* chunk, int64_t task, int64_t next) {
    const Chunk& self = *static_cast<const Chunk*>(chunk);
    const PanelTask* tasks = self.scratch_.second_tasks.data();
    self.second_gemm_panels(tasks[task], next == kNoTask ? nullptr : tasks + next);
  });
  set(4, row_tasks(count_, hidden_),
      [](const void* chunk, int64_t task, int64_t) { static_cast<const Chunk*>(chunk)->combine(task); });
  if (dot_.few_rows > 0) {  // whose kernels ask for what comes next
    for (int i : {1, 3}) passes[i].drawn_ahead = passes[i].tasks - kNotDrawnAhead * parallel_.threads;
  }
  run_passes(parallel_, passes, 5, slots_ * inter_ * hidden_);
}

Operands Chunk::take_operands(Workspace& workspace, int64_t rows, int64_t size, const ActQuant& quant,
                              const Weight& weight) const {
  const int64_t groups = quant.group > 0 ? divide_up(size, quant.group) : 0;
  Operands operands;
  operands.row_bytes = size * bytes_of(dot_.operand);
  // Room for zeros, and an odd number of cache lines, so that the rows of a tile do not all fall into one cache set.
  if (tiled()) operands.row_bytes = (divide_up(operands.row_bytes + 32, 64) | 1) * 64;
  operands.groups = groups;
  operands.data = workspace.take<uint8_t>(rows * operands.row_bytes);
  operands.row_scale = workspace.take<float>(rows);
  float* scales = workspace.take<float>(rows * groups);
  if (groups > 0) operands.group_scales = scales;
  if (dot_.operand == OperandType::kInt8) {
    operands.sum_units = weight.group_units;
    operands.sum_groups = spans_of(weight.units, weight.group_units);
    operands.sums = workspace.take<int32_t>(rows * operands.sum_groups);
  }
  return operands;
}

void Chunk::allocate(Workspace& workspace) {
  // Twice the same walk: once to measure, once to hand out.
  for (bool measure : {true, false}) {
    workspace.start(measure);
    values_ = workspace.take<float>(input_rows() * hidden_);
    input_ = take_operands(workspace, input_operands(), hidden_, args_.a1, args_.w13);
    h_ = workspace.take<float>(slots_ * inter_);
    intermediate_ = take_operands(workspace, slots_, inter_, args_.a2, args_.w2);
    y_ = workspace.take<float>(slots_ * hidden_);
  }
}

void run_experts(const ExpertsArgs& args, const IsaTable& isa, const Dot& dot, const Parallel& parallel) {
  constexpr int64_t kChunkTokens = 1024;  // bounds the workspace; weights are read once per chunk
  static thread_local Scratch scratch;
  for (int64_t first = 0; first < args.num_tokens; first += kChunkTokens) {
    const int64_t count = std::min(kChunkTokens, args.num_tokens - first);
    Chunk(args, isa, dot, parallel, first, count, scratch).run();
  }
  scratch.workspace.trim();
}

}  // namespace moeq::cpu
