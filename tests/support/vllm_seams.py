"""What the plug-in takes for granted of vLLM: where its interfaces are and what they take, as its sources have them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

LAYERS = "model_executor/layers"
MOE, QUANTIZATION = f"{LAYERS}/fused_moe", f"{LAYERS}/quantization"
METHOD = f"{MOE}/fused_moe_method_base.py:FusedMoEMethodBase"
COMPRESSED = f"{QUANTIZATION}/compressed_tensors/compressed_tensors.py:CompressedTensorsConfig"
MODELOPT = f"{QUANTIZATION}/modelopt.py"
KERNEL = f"{MOE}/modular_kernel.py"
LORA = "lora/layers/fused_moe.py"
_EXPERTS = ["w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts", "expert_map"]
_SIZES = ["M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"]

# file:function or file:class.method -> its parameters. "...": more of them may follow.
FUNCTIONS: dict[str, list[str]] = {
    f"{QUANTIZATION}/__init__.py:register_quantization_config": ["quantization"],
    f"{METHOD}.__init__": ["self", "moe"],
    f"{METHOD}.create_weights": [
        "self",
        "layer",
        "num_experts",
        "hidden_size",
        "intermediate_size_per_partition",
        "params_dtype",
        "**extra_weight_attrs",
    ],
    f"{METHOD}.get_fused_moe_quant_config": ["self", "layer"],
    f"{METHOD}.uses_weight_scale_2_pattern": ["self"],
    f"{METHOD}.apply": [
        "self",
        "layer",
        "x",
        "topk_weights",
        "topk_ids",
        "shared_experts",
        "shared_experts_input",
    ],
    f"{QUANTIZATION}/base_config.py:QuantizeMethodBase.process_weights_after_loading": ["self", "layer"],
    f"{QUANTIZATION}/base_config.py:QuantizationConfig.get_quant_method": ["self", "layer", "prefix"],
    f"{MODELOPT}:ModelOptQuantConfigBase.get_quant_method": ["self", "layer", "prefix"],
    f"{MODELOPT}:ModelOptQuantConfigBase.is_layer_excluded": ["self", "prefix"],
    f"{MODELOPT}:ModelOptMixedPrecisionConfig.get_quant_method": ["self", "layer", "prefix"],
    f"{MODELOPT}:ModelOptMixedPrecisionConfig._resolve_quant_algo": ["self", "prefix"],
    f"{QUANTIZATION}/fp8.py:Fp8Config.get_quant_method": ["self", "layer", "prefix"],
    f"{QUANTIZATION}/mxfp4.py:Mxfp4Config.get_quant_method": ["self", "layer", "prefix"],
    f"{QUANTIZATION}/utils/quant_utils.py:is_layer_skipped": ["prefix", "ignored_layers", "fused_mapping", "..."],
    f"{COMPRESSED}.get_quant_method": ["self", "layer", "prefix"],
    f"{COMPRESSED}.get_scheme_dict": ["self", "layer", "layer_name"],
    f"{COMPRESSED}._add_fused_moe_to_target_scheme_map": ["self"],
    f"{MOE}/routed_experts.py:RoutedExperts.weight_loader": [
        "self",
        "param",
        "loaded_weight",
        "weight_name",
        "shard_id",
        "expert_id",
        "return_success",
    ],
    f"{MOE}/all2all_utils.py:maybe_make_prepare_finalize": [
        "moe",
        "quant_config",
        "routing_tables",
        "allow_new_interface",
        "use_monolithic",
        "...",
    ],
    f"{KERNEL}:FusedMoEKernel.__init__": ["self", "prepare_finalize", "fused_experts"],
    f"{KERNEL}:FusedMoEKernel.apply": [
        "self",
        "hidden_states",
        *_EXPERTS,
        "apply_router_weight_on_input",
        "shared_experts",
        "shared_experts_input",
    ],
    f"{KERNEL}:FusedMoEExperts.__init__": ["self", "moe_config", "quant_config", "max_num_tokens", "num_dispatchers"],
    f"{KERNEL}:FusedMoEExperts._supports_quant_scheme": ["weight_key", "activation_key"],
    f"{KERNEL}:FusedMoEExpertsModular.workspace_shapes": ["self", *_SIZES],
    f"{KERNEL}:FusedMoEExpertsModular.apply": [
        "self",
        "output",
        "hidden_states",
        *_EXPERTS,
        "a1q_scale",
        "a2_scale",
        "workspace13",
        "workspace2",
        "expert_tokens_meta",
        "apply_router_weight_on_input",
    ],
    f"{MOE}/prepare_finalize/no_dp_ep.py:make_moe_prepare_and_finalize_no_dp_ep": ["use_monolithic"],
    f"{MOE}/experts/lora_experts_mixin.py:LoRAExpertsMixin.set_lora_context": ["self", "ctx"],
    f"{LORA}:FusedMoEWithLoRA.set_mapping": ["self", "punica_wrapper"],
    "model_executor/utils.py:set_weight_attrs": ["weight", "weight_attrs"],
}

# Class -> attributes that it has or sets.
ATTRIBUTES: dict[str, set[str]] = {
    f"{MOE}/config.py:FusedMoEConfig": {
        "num_experts",
        "num_local_experts",
        "experts_per_token",
        "hidden_dim",
        "intermediate_size_per_partition",
        "moe_parallel_config",
        "moe_backend",
        "has_bias",
        "is_lora_enabled",
        "is_act_and_mul",
    },
    "config/vllm.py:VllmConfig": {"additional_config", "lora_config"},
    "config/lora.py:LoRAConfig": {"fully_sharded_loras", "enable_moe_shared_loras"},
    f"{MOE}/experts/lora_context.py:MoELoRAContext": {
        "w13_lora_a_stacked",
        "w13_lora_b_stacked",
        "w2_lora_a_stacked",
        "w2_lora_b_stacked",
        "max_loras",
        "punica_wrapper",
    },
    "lora/punica_wrapper/punica_base.py:PunicaWrapperBase": {"_token_lora_indices"},
    f"{MOE}/config.py:FusedMoEParallelConfig": {
        "tp_size",
        "dp_size",
        "enable_eplb",
        "all2all_backend",
        "use_all2all_kernels",
        "use_ep",
    },
    f"{MOE}/routed_experts.py:RoutedExperts": {
        "activation",
        "apply_router_weight_on_input",
        "ckpt_gate_proj_name",
        "ckpt_up_proj_name",
        "ckpt_down_proj_name",
        "_expert_routing_tables",
        "expert_map_manager",
        "global_num_experts",
        "moe_config",
        "params_dtype",
        "swiglu_limit",
        "swiglu_alpha",
        "swiglu_beta",
    },
    f"{QUANTIZATION}/fp8.py:Fp8Config": {
        "activation_scheme",
        "ignored_layers",
        "is_checkpoint_fp8_serialized",
        "weight_block_size",
    },
    f"{MODELOPT}:ModelOptNvFp4Config": {"quant_method"},
    f"{MODELOPT}:ModelOptFp8Config": {"quant_method"},
    f"{QUANTIZATION}/mxfp4.py:GptOssMxfp4Config": {"get_name"},
}

# What the shared experts of a layer are, which its runner calls.
ATTRIBUTES |= {
    f"{MOE}/runner/moe_runner.py:MoERunner": {
        "_forward_entry",
        "_select_forward",
        "_shared_experts",
        "routed_experts",
        "routed_input_transform",
        "routed_output_transform",
        "routed_scaling_factor",
        "shared_experts",
    },
    f"{MOE}/runner/shared_experts.py:SharedExperts": {"_layer"},
    f"{LAYERS}/linear.py:LinearBase": {"quant_method", "tp_size"},
    f"{LAYERS}/linear.py:RowParallelLinear": {"input_size_per_partition", "reduce_results"},
    "config/compilation.py:CompilationConfig": {"static_forward_context"},
    **{
        f"model_executor/models/{file}.py:{block}": {"gate_up_proj", "act_fn", "down_proj", *more}
        for file, block, *more in (
            ("deepseek_v2", "DeepseekV2MLP"),
            ("glm4_moe", "Glm4MoeMLP"),
            ("qwen2_moe", "Qwen2MoeMLP", "expert_gate"),
        )
    },
}

# Class -> methods that a subclass must have; another one would keep ours from being made.
ABSTRACT: dict[str, set[str]] = {
    f"{KERNEL}:FusedMoEExperts": {
        "activation_format",
        "_supports_current_device",
        "_supports_no_act_and_mul",
        "_supports_quant_scheme",
        "_supports_activation",
        "_supports_parallel_config",
    },
    f"{KERNEL}:FusedMoEExpertsModular": {"workspace_shapes", "finalize_weight_and_reduce_impl", "apply"},
}

# Words without which the weight loader would treat our tensors in another way.
TEXTS: dict[str, list[str]] = {
    f"{MOE}/routed_experts.py": ['"ModelOpt" in quant_method_name', '"_expert_map"', "uses_weight_scale_2_pattern()"],
    "model_executor/models/gpt_oss.py": ['"gpt_oss_mxfp4"', '"weight_dtype"'],
    "config/vllm.py": ["json.dumps(additional_config"],
    # The runner leaves the exchange of tokens to a method that has a kernel.
    f"{MOE}/fused_moe_method_base.py": ["return self.moe_kernel is not None"],
    f"{MOE}/runner/moe_runner.py": [
        "self._quant_method.supports_internal_mk",
        "_moe_forward if self._shared_experts is None else _moe_forward_shared",
        "fused_output *= self.routed_scaling_factor",
        "static_forward_context[prefix] = layer",
    ],
    # A method's class says how its linear loads.
    f"{LAYERS}/linear.py": ["quant_method.__class__.__name__ in WEIGHT_LOADER_V2_SUPPORTED"],
    f"{MOE}/config.py": ["FUSED_MOE_UNQUANTIZED_CONFIG"],
    # What our experts have of a layer with adapters, and what who wraps our method reads of it.
    LORA: ["fused_experts.set_lora_context(lora_context)", "quant_method.moe_kernel", "].copy_("],
    f"{MOE}/fused_moe_modular_method.py": ["w1=layer.w13_weight", "w2=layer.w2_weight"],
    "plugins/__init__.py": ['"vllm.general_plugins"'],
}


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _find(root: Path, seam: str) -> ast.AST | None:
    file, _, dotted = seam.partition(":")
    path = root / file
    if not path.exists():
        return None
    node: ast.AST | None = _tree(path)
    for name in dotted.split("."):
        inside = [n for n in ast.walk(node) if getattr(n, "name", None) == name] if node is not None else []
        node = inside[-1] if inside else None  # the last one: overloads come before
    return node


def _parameters(node: ast.FunctionDef) -> list[str]:
    found = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return found + ([f"**{node.args.kwarg.arg}"] if node.args.kwarg else [])


def _attributes(root: Path, node: ast.ClassDef) -> set[str]:
    """Fields, methods, and what methods set on self."""
    names = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            names.add(inner.attr)
        if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
            names.add(inner.target.id)
        if isinstance(inner, ast.FunctionDef):
            names.add(inner.name)
    return names


def _abstract(node: ast.ClassDef) -> set[str]:
    methods = (n for n in node.body if isinstance(n, ast.FunctionDef))
    return {
        m.name for m in methods if any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in m.decorator_list)
    }


def broken(root: Path) -> list[str]:
    """Every seam that the sources under `root` (the package's folder) do not have."""
    wrong = []
    for seam, wanted in FUNCTIONS.items():
        node = _find(root, seam)
        if not isinstance(node, ast.FunctionDef):
            wrong.append(f"{seam} must be there")
            continue
        found = _parameters(node)
        fits = found[: len(wanted) - 1] == wanted[:-1] if wanted[-1] == "..." else found == wanted
        if not fits:
            wrong.append(f"{seam} must take {wanted}, takes {found}")
    for seam, names in ATTRIBUTES.items():
        node = _find(root, seam)
        if not isinstance(node, ast.ClassDef):
            wrong.append(f"{seam} must be there")
        elif lacking := names - _attributes(root, node):
            wrong.append(f"{seam} must have {sorted(lacking)}")
    for seam, names in ABSTRACT.items():
        node = _find(root, seam)
        if not isinstance(node, ast.ClassDef):
            wrong.append(f"{seam} must be there")
        elif unknown := _abstract(node) - names:
            wrong.append(f"{seam} must leave {sorted(names)} to subclasses, leaves {sorted(unknown)} too")
    for file, texts in TEXTS.items():
        text = (root / file).read_text() if (root / file).exists() else ""
        wrong += [f"{file} must say {words!r}" for words in texts if words not in text]
    return wrong
