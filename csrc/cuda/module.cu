// The extension torch_moe_ops._C_cuda: schemas of its ops, and the symbol that lets Python import it.
//
// Every schema of this extension is defined here. A fragment, because the CPU extension shares the namespace and
// either may be absent.
#include <Python.h>
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_FRAGMENT(moeq_C, m) {
  m.def("quantize_nvfp4_cuda(Tensor x, Tensor gscale) -> (Tensor, Tensor)");
  m.def("dynamic_gscale_nvfp4_cuda(Tensor x) -> Tensor");
  m.def(
      "experts_sm90(Tensor(a!) out, Tensor hidden_states, Tensor? topk_ids, Tensor? topk_weights, Tensor w13, "
      "Tensor w13_scale, Tensor? g1_alphas, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? g2_alphas, "
      "Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, bool quantize_hidden, bool quantize_intermediate, "
      "str activation, float alpha, float beta, float limit, int expert_offset, bool weight_on_input, int kernel, "
      "Tensor? router_logits, Tensor? routing_bias, str score, str weight, bool renormalize, int top_k, int n_group, "
      "int topk_group, float factor) -> ()");
  m.def(
      "route_sm90(Tensor(a!) ids, Tensor(b!) weights, Tensor router_logits, Tensor? routing_bias, str score, "
      "str weight, bool renormalize, int n_group, int topk_group, float factor) -> ()");
  m.def(
      "experts_sm90_bf16(Tensor(a!) out, Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor w13, "
      "Tensor? w13_bias, Tensor w2, Tensor? w2_bias, str activation, float alpha, float beta, float limit, "
      "int expert_offset, bool weight_on_input) -> ()");
  m.def(
      "experts_sm90_w4a8(Tensor(a!) out, Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor w13, "
      "Tensor w13_scale, Tensor? g1_alphas, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor? g2_alphas, "
      "Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, str activation, float alpha, float beta, float limit, "
      "int expert_offset, bool weight_on_input, str weights, Tensor? hidden_states_scale) -> ()");
}

// Importing is for its side effect only: loading the library runs the registrations.
extern "C" PyObject* PyInit__C_cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
