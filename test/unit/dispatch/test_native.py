"""Installed DeepEP packages, played by doubles that assert what the real kernels assert."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from musa_titan.dispatch.errors import DispatchError
from musa_titan.dispatch.module import build_modules
from musa_titan.dispatch.native import probe
from musa_titan.dispatch.options import Options, set_options
from test.doubles import deep_ep as doubles
from test.unit.dispatch.cases import Case, make_case
from test.unit.dispatch.test_transport import expected_rows, same_bits
from test.unit.fp8.ranks import run_ranks

os.environ.setdefault("ACCELERATOR_BACKEND", "cpu")
SURFACES = {"v1": doubles.V1, "v2 legacy": doubles.V1, "mt": doubles.Mt, "mt ace": doubles.MtAce}


def installed(name: str) -> None:
    sys.modules["deep_ep"], sys.modules["deep_ep.utils"] = doubles.package(SURFACES[name], name != "v2 legacy")


def options(**more: Any) -> None:
    set_options(Options(**{"backend": "collective", "tokens": 40, "hidden": 36, "topk": 2, **more}))


def dispatch(buffer: Any, case: Case, rank: int, x: torch.Tensor, **more: Any) -> Any:
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(case.topk_idx[rank], case.experts)
    return buffer.dispatch(
        x, topk_idx=case.topk_idx[rank], topk_weights=case.topk_weights[rank], num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert, **more,
    )  # fmt: skip


def case_of(ranks: int) -> Case:
    """36 values of bf16 are 72 bytes, no multiple of 16."""
    return make_case("n", ranks, tokens=[20, 31], hidden=36, topk=2, experts=4, dtype=torch.bfloat16, seed=1)


def round_trip(name: str, rank: int, ranks: int) -> None:
    """What Megatron's fused_a2a does with a deep_ep, call by call."""
    installed(name)
    options()
    modules = build_modules("native")
    buffer_class, utils = modules["deep_ep"].Buffer, modules["deep_ep.utils"]
    assert modules["deep_ep"].HybridEPBuffer is object  # the rest of the package is still there
    group = dist.group.WORLD
    buffer_class.set_num_sms(24)
    assert doubles.V1.num_sms == 24
    configs = (buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks))
    size = max(config.get_nvl_buffer_size_hint(72, ranks) for config in configs)
    assert max(config.get_rdma_buffer_size_hint(72, ranks) for config in configs) == 0
    buffer = buffer_class(group, size, 0)
    assert (buffer.group, buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (group, size, 0)
    case = case_of(ranks)
    previous = utils.EventOverlap(utils.EventHandle())
    events = {"previous_event": previous, "async_finish": True, "allocate_on_comm_stream": True}
    x, _, weights, counts, handle, event = dispatch(buffer, case, rank, case.x[rank], **events)
    event.current_stream_wait()
    assert same_bits(x, expected_rows(case, rank))
    assert sum(counts) >= x.shape[0]
    ones = torch.ones_like(x)
    total, summed, event = buffer.combine(ones, handle, topk_weights=weights, **events)
    event.current_stream_wait()
    assert total.shape == case.x[rank].shape
    assert total[:, 0].tolist() == [float(len(case.targets(rank, t))) for t in range(case.x[rank].shape[0])]
    assert torch.equal(summed, case.topk_weights[rank])
    total, none, _ = buffer.combine(ones, handle=handle)
    assert none is None
    again, *_ = buffer.dispatch(case.x[rank], handle=handle)
    assert same_bits(again, x)


@pytest.mark.parametrize("name", SURFACES)
def test_every_known_surface_serves_megatrons_calls(name: str) -> None:
    run_ranks(partial(round_trip, name), 2)


def fp8_pairs(rank: int, ranks: int) -> None:
    installed("v1")
    options(fp8_dispatch=True, fp8_combine_grad=True)
    case = make_case("f", ranks, tokens=[20, 31], hidden=256, topk=2, experts=4, dtype=torch.bfloat16, seed=1)
    values = [torch.randn(t.shape, generator=torch.Generator().manual_seed(n)).bfloat16() for n, t in enumerate(case.x)]
    buffer = build_modules("native")["deep_ep"].Buffer(dist.group.WORLD, 1 << 20, 0)
    from musa_titan.dispatch import wire

    expected = torch.stack(
        [wire.decode(wire.encode(values[s][t][None]), 256, torch.bfloat16)[0] for s, t in case.received(rank)]
    )
    x, _, _, _, handle, _ = dispatch(buffer, case, rank, values[rank])
    assert torch.equal(x, expected)
    again, *_ = buffer.dispatch(values[rank], handle=handle)
    assert torch.equal(again, expected)
    buffer.combine(x, handle)
    assert buffer.buffer.sent == [torch.float8_e4m3fn] * 2


def test_fp8_messages_go_as_pairs_of_codes_and_scales() -> None:
    run_ranks(fp8_pairs, 2)


def refusals(rank: int, ranks: int) -> dict[str, str]:
    case = case_of(ranks)
    found = {}

    def attempt(key: str, call: Any) -> None:
        try:
            call()
        except DispatchError as error:
            found[key] = str(error)

    installed("mt ace")
    options(tokens=10)
    buffer = build_modules("native")["deep_ep"].Buffer(dist.group.WORLD, 1 << 20, 0)
    attempt("tokens", lambda: dispatch(buffer, case, rank, case.x[rank]))
    attempt("rows", lambda: buffer.combine(torch.zeros(21, 36, dtype=torch.bfloat16), None))
    options(fp8_dispatch=True)
    attempt("fp8", lambda: dispatch(buffer, case, rank, case.x[rank]))
    installed("mt")
    options()
    public = build_modules("native")["deep_ep"].Buffer(dist.group.WORLD, 1 << 20, 0)
    attempt("worst", lambda: dispatch(public, case, rank, case.x[rank], num_worst_tokens=64))
    attempt("bias", lambda: public.combine(case.x[rank], None, bias=case.x[rank]))
    return found


def test_what_a_wheel_cannot_do_is_refused_with_the_option_to_change() -> None:
    for found in run_ranks(refusals, 2):
        assert "--musa-dispatch-tokens 20" in found["tokens"] or "--musa-dispatch-tokens 31" in found["tokens"]
        assert "--musa-dispatch-tokens 11" in found["rows"]
        assert "moves bf16 only" in found["fp8"]
        assert "does not take num_worst_tokens in dispatch" in found["worst"]
        assert "does not take bias in combine" in found["bias"]


def test_an_unknown_api_is_named_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = ModuleType("deep_ep")
    empty.ElasticBuffer = object  # type: ignore[attr-defined]
    with pytest.raises(DispatchError, match="it has no Buffer, only ElasticBuffer"):
        probe(empty)
    half = type("Buffer", (), {"__init__": lambda self, group, num_nvl_bytes: None, "dispatch": lambda self, x: None})
    with pytest.raises(DispatchError, match="its Buffer has no get_dispatch_layout, combine"):
        probe(doubles.package(half)[0])
    sizeless = type("Buffer", (doubles.V1,), {"__init__": lambda self, group, bytes: None})
    with pytest.raises(DispatchError, match=r"takes \(bytes, group\) and no number of bytes"):
        probe(doubles.package(sizeless)[0])
    monkeypatch.setitem(sys.modules, "deep_ep", empty)
    monkeypatch.setitem(sys.modules, "deep_ep.utils", ModuleType("deep_ep.utils"))
    with pytest.raises(DispatchError, match="unknown API"):
        build_modules("native")


def test_auto_takes_ours_where_nothing_usable_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from musa_titan.dispatch.buffer import Buffer

    assert build_modules("auto")["deep_ep"].Buffer is Buffer
    assert not caplog.records
    empty = ModuleType("deep_ep")
    empty.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "deep_ep", empty)
    monkeypatch.setitem(sys.modules, "deep_ep.utils", ModuleType("deep_ep.utils"))
    assert build_modules("auto")["deep_ep"].Buffer is Buffer
    assert "is not used" in caplog.text


def test_auto_prefers_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    module, utils = doubles.package(doubles.Mt)
    monkeypatch.setitem(sys.modules, "deep_ep", module)
    monkeypatch.setitem(sys.modules, "deep_ep.utils", utils)
    made = build_modules("auto")["deep_ep"]
    assert made is not module  # the installed package itself is left as it was
    assert made.Buffer.native is doubles.Mt
    assert module.Buffer is doubles.Mt
