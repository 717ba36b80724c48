// The extension torch_moe_ops._C_cuda: schemas of its ops, and the symbol that lets Python import it.
//
// Every schema of this extension is defined here; generated/calls.h has those of ops that run experts. A fragment,
// because the CPU extension shares the namespace and either may be absent.
#include <Python.h>
#include <torch/csrc/stable/library.h>

#include "../generated/calls.h"
#include "../generated/router.h"

STABLE_TORCH_LIBRARY_FRAGMENT(moeq_C, m) {
  m.def("quantize_nvfp4_cuda(Tensor x, Tensor gscale) -> (Tensor, Tensor)");
  m.def("dynamic_gscale_nvfp4_cuda(Tensor x) -> Tensor");
  m.def(
      "ep_p2p_dispatch(Tensor x, Tensor? scale, Tensor ids, Tensor weights, Tensor(a!) x_out, Tensor(b!)? scale_out, "
      "Tensor(c!) ids_out, Tensor(d!) weights_out, Tensor buffers, int rank, int max_tokens, float limit, "
      "int few) -> ()");
  m.def(
      "ep_p2p_combine(Tensor partial, Tensor(a!) out, Tensor buffers, int rank, float limit, int few) -> "
      "()");
  m.def(
      "ep_p2p_stage(Tensor tokens, Tensor ids, Tensor weights, Tensor(a!) places, Tensor buffers, Tensor heaps, Tensor "
      "sizes, int rank, int max_tokens, float limit, Tensor? first=None, Tensor? count=None, Tensor? slots=None, "
      "Tensor(b!)? load=None) -> ()");
  m.def(
      "ep_p2p_sum(Tensor parts, Tensor places, Tensor(a!) out, Tensor ends, Tensor buffers, Tensor heaps, Tensor "
      "sizes, int rank, float limit) -> ()");
  m.def("ep_p2p_buffer_bytes() -> int");
  m.def(moeq::ExpertsSm90Call::kSchema);
  m.def(moeq::ExpertsSm90RemoteCall::kSchema);
  m.def(moeq::ExpertsSm90RowsCall::kSchema);
  m.def("experts_sm90_rows_kept(int tokens, int top_k, int experts, int hidden, int inter) -> int");
  m.def(moeq::ExpertsSm90Bf16Call::kSchema);
  m.def(moeq::ExpertsSm90W4a8Call::kSchema);
  m.def(moeq::RouteSm90Call::kSchema);
  m.def(moeq::RouteHiddenSm90Call::kSchema);
}

// Importing is for its side effect only: loading the library runs the registrations.
PyMODINIT_FUNC PyInit__C_cuda() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
