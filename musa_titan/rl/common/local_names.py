"""Names of local layers' parameters, as Transformer Engine's layers would call them.

The frameworks' converters are written for Transformer Engine, which fuses a norm into the linear layer after it and
numbers the experts of a grouped layer inside the parameter's name::

    input_layernorm.weight                              self_attention.linear_qkv.layer_norm_weight
    pre_mlp_layernorm.weight, in a dense layer          mlp.linear_fc1.layer_norm_weight
    self_attention.q_layernorm.weight, with MLA         self_attention.linear_q_up_proj.layer_norm_weight
    self_attention.kv_layernorm.weight, with MLA        self_attention.linear_kv_up_proj.layer_norm_weight
    mlp.experts.local_experts.3.linear_fc1.weight       mlp.experts.linear_fc1.weight3

With MLA Transformer Engine keeps ``input_layernorm`` and, for experts, ``pre_mlp_layernorm`` apart, and so do we.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_LAYER = re.compile(r"(?P<layer>.*\blayers\.\d+\.(?:transformer_layer\.)?)(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<before>mlp\.experts\.)local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc[12])\.weight")
_MLA_NORMS = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def rename_parameters(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """`named` in its order, under Transformer Engine's names; names that are such already stay."""
    items = list(named)
    present = {name for name, _ in items}
    for name, value in items:
        yield transformer_engine_name(name, present), value


def transformer_engine_name(name: str, present: set[str]) -> str:
    """The name of one parameter; `present` are all of the model chunk, which tell MLA and dense layers apart."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, rest = match["layer"], match["rest"]
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        return f"{layer}{expert['before']}{expert['linear']}.weight{expert['number']}"
    if f"{layer}self_attention.linear_kv_down_proj.weight" in present:
        rest = _MLA_NORMS.get(rest, rest)
    elif rest == "input_layernorm.weight" and f"{layer}self_attention.linear_qkv.weight" in present:
        rest = "self_attention.linear_qkv.layer_norm_weight"
    if rest == "pre_mlp_layernorm.weight" and f"{layer}mlp.linear_fc1.weight" in present:
        rest = "mlp.linear_fc1.layer_norm_weight"
    return layer + rest
