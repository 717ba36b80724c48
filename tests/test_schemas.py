"""All schemas and tags, pinned: a change here is a change of the public interface."""

from __future__ import annotations

import torch
from torch.testing._internal.common_utils import TestCase, run_tests

from samples import overload
from torch_moe_ops._schemas import SCHEMAS


class TestSchemas(TestCase):
    def test_pinned(self) -> None:
        lines = []
        for name in sorted(SCHEMAS):
            op = overload(name)
            schema = str(op._schema).replace("Tensor(a!) out) -> Tensor(a!)", "Tensor(a!) out) -> ()")
            tags = sorted(str(t).removeprefix("Tag.") for t in op.tags)
            tags = [t for t in tags if t != "out"]  # only where torch has it
            lines.append(f"{schema}  [{', '.join(tags)}]")
        self.assertExpectedInline("\n".join(lines), """\
moeq::dynamic_gscale_nvfp4(Tensor x) -> Tensor  [pt2_compliant_tag]
moeq::moe(Tensor hidden_states, Tensor? hidden_states_scale, Tensor router_logits, Tensor? routing_bias, Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias, str backend, str routing_method, int top_k, str act_format="none", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, int n_group=0, int topk_group=0, float routed_scaling_factor=1., bool? renormalize=None, str weight_policy="exact", ScalarType? out_dtype=None) -> Tensor  [pt2_compliant_tag]
moeq::moe_routed(Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias, str backend, str act_format="none", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, bool router_weight_on_input=False, str weight_policy="exact", ScalarType? out_dtype=None) -> Tensor  [pt2_compliant_tag]
moeq::moe_routed.out(Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias, str backend, str act_format="none", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, bool router_weight_on_input=False, str weight_policy="exact", ScalarType? out_dtype=None, *, Tensor(a!) out) -> ()  [pt2_compliant_tag]
moeq::nvfp4_moe(Tensor hidden_states, Tensor? hidden_states_scale, Tensor router_logits, Tensor? routing_bias, Tensor w13, Tensor w13_scale, Tensor g1_alphas, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, str backend, str routing_method, int top_k, str act_format="nvfp4", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, int n_group=0, int topk_group=0, float routed_scaling_factor=1., bool? renormalize=None, str weight_policy="exact", ScalarType? out_dtype=None) -> Tensor  [pt2_compliant_tag]
moeq::nvfp4_moe_routed(Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, Tensor g1_alphas, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, str backend, str act_format="nvfp4", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, bool router_weight_on_input=False, str weight_policy="exact", ScalarType? out_dtype=None) -> Tensor  [pt2_compliant_tag]
moeq::nvfp4_moe_routed.out(Tensor hidden_states, Tensor? hidden_states_scale, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor w13_scale, Tensor g1_alphas, Tensor? w13_bias, Tensor w2, Tensor w2_scale, Tensor g2_alphas, Tensor? w2_bias, Tensor? a1_gscale, Tensor? a2_gscale, str backend, str act_format="nvfp4", str activation="silu", float? swiglu_alpha=None, float? swiglu_beta=None, float? swiglu_limit=None, int num_experts=0, int local_expert_offset=0, bool router_weight_on_input=False, str weight_policy="exact", ScalarType? out_dtype=None, *, Tensor(a!) out) -> ()  [pt2_compliant_tag]
moeq::quantize_nvfp4(Tensor x, Tensor gscale) -> (Tensor codes, Tensor scale)  [pt2_compliant_tag]
moeq::route(Tensor router_logits, Tensor? routing_bias, str routing_method, int top_k, int n_group=0, int topk_group=0, float routed_scaling_factor=1., bool? renormalize=None) -> (Tensor topk_ids, Tensor topk_weights)  [pt2_compliant_tag]
moeq::swizzle_scale(Tensor scale) -> Tensor  [pt2_compliant_tag]
moeq::unswizzle_scale(Tensor swizzled, int rows, int cols) -> Tensor  [pt2_compliant_tag]""")

    def test_out_is_tagged_where_torch_can(self) -> None:
        for name in SCHEMAS:
            tagged = hasattr(torch.Tag, "out") and torch.Tag.out in overload(name).tags
            self.assertEqual(tagged, name.endswith(".out") and hasattr(torch.Tag, "out"))


if __name__ == "__main__":
    run_tests()
