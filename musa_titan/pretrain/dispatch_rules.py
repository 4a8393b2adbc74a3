"""What dispatch, FP8 all-to-all, MoE recompute and the load report ask of Megatron's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from musa_titan.dispatch.options import Options
from musa_titan.patching.spec import Context, MusaTitanError
from musa_titan.settings import Settings


@dataclass(frozen=True)
class Request:
    """What the validated command line says about the experts."""

    dispatcher: str
    tokens: int
    """Of one rank in one micro-batch."""
    hidden: int
    topk: int
    """Of DeepEP's group, which repeats every expert for each tensor-parallel rank."""


request: Request | None = None
"""None until a command line was validated, and in programs that have none."""


def validate_dispatch(settings: Settings, args: Any) -> None:
    """Note the shape of a dispatch.

    Raises:
        MusaTitanError: nothing in this run would use it, or a number is out of range.
    """
    _note(args, f"--musa-dispatch {settings['dispatch'].backend}")
    if not _is_deepep(args):
        raise MusaTitanError(
            "--musa-dispatch provides DeepEP, but this run does not use it. Add --moe-token-dispatcher-type flex "
            "--moe-flex-dispatcher-backend deepep (before 0.16: --moe-enable-deepep), or drop --musa-dispatch"
        )
    options = settings["dispatch"]
    for name in ("capacity", "tokens", "timeout"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise MusaTitanError(f"--musa-dispatch-{name} {value}: it must be above 0")


def validate_fp8(settings: Settings, args: Any) -> None:
    """Refuse FP8 messages where there are none of ours.

    Raises:
        MusaTitanError: no expert parallelism, another dispatcher, or parameters that FP8 is no saving for.
    """
    _note(args, "--musa-fp8-alltoall")
    options = settings["fp8_alltoall"]
    if options.dispatch_fwd_dtype == options.combine_bwd_dtype == "bf16":
        raise MusaTitanError("--musa-fp8-alltoall with bf16 in both directions does nothing. Drop it")
    if not args.bf16:
        raise MusaTitanError("--musa-fp8-alltoall replaces bf16 messages. Add --bf16, or drop it")
    kind = args.moe_token_dispatcher_type
    if kind == "flex" and not (_is_deepep(args) and settings.enabled("dispatch")):
        raise MusaTitanError(
            "--musa-fp8-alltoall with --moe-token-dispatcher-type flex works in the deep_ep that --musa-dispatch "
            "provides. Add --musa-dispatch auto and --moe-flex-dispatcher-backend deepep, or use alltoall"
        )
    if kind not in ("flex", "alltoall"):
        raise MusaTitanError(
            f"--musa-fp8-alltoall: the {kind} dispatcher has no all-to-all. Use --moe-token-dispatcher-type "
            "alltoall or flex"
        )
    if args.expert_model_parallel_size == 1 and kind == "alltoall":
        raise MusaTitanError(
            "--musa-fp8-alltoall: with --expert-model-parallel-size 1 tokens stay where they are. Drop it"
        )


def validate_recompute(settings: Settings, args: Any) -> None:
    """Refuse what would not keep codes, or would compute experts three times.

    Raises:
        MusaTitanError: tokens do not arrive in FP8, the experts are others, or Megatron recomputes them too.
    """
    if settings["fp8_alltoall"].dispatch_fwd_dtype != "fp8":
        raise MusaTitanError(
            "--musa-moe-recompute keeps the FP8 codes in which tokens arrive. Use "
            "--musa-fp8-alltoall-dispatch-fwd-dtype fp8, or drop it"
        )
    if args.transformer_impl != "local":
        raise MusaTitanError(
            "--musa-moe-recompute is for the experts of --transformer-impl local. With Transformer Engine use "
            "--recompute-granularity selective --recompute-modules moe_act"
        )
    modules = args.recompute_modules or ()
    if args.recompute_granularity == "full" or (args.recompute_granularity == "selective" and "moe" in modules):
        raise MusaTitanError(
            "--musa-moe-recompute: Megatron recomputes the MoE layer already. Drop it, or --recompute-granularity full "
            "(moe among --recompute-modules)"
        )


def validate_load(settings: Settings, args: Any) -> None:
    """Refuse a report about no experts."""
    _note(args, "--musa-expert-load")


def alltoall_in_fp8(context: Context) -> str | None:
    """Patch condition: messages of the alltoall dispatcher are ours to send."""
    if request is None or request.dispatcher == "alltoall":
        return None
    return f"the {request.dispatcher} dispatcher sends by itself"


def dispatch_options(settings: Settings) -> Options:
    """What Buffers of this run are made with."""
    options, fp8 = settings["dispatch"], settings["fp8_alltoall"]
    found = request or Request("flex", Options.tokens, 0, Options.topk)
    return Options(
        backend=options.backend,
        tokens=found.tokens if options.tokens is None else options.tokens,
        capacity=options.capacity,
        timeout=options.timeout,
        fp8_dispatch=fp8.enabled and fp8.dispatch_fwd_dtype == "fp8",
        fp8_combine_grad=fp8.enabled and fp8.combine_bwd_dtype == "fp8",
        hidden=found.hidden,
        topk=found.topk,
    )


def _note(args: Any, flag: str) -> None:
    global request
    if not args.num_experts:
        raise MusaTitanError(f"{flag} is for mixture-of-experts models. Set --num-experts, or drop it")
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    split = context * (tensor if args.sequence_parallel else 1)
    request = Request(
        args.moe_token_dispatcher_type,
        args.seq_length * args.micro_batch_size // split,
        args.hidden_size,
        args.moe_router_topk * tensor,
    )


def _is_deepep(args: Any) -> bool:
    if args.moe_token_dispatcher_type != "flex":
        return False
    backend = getattr(args, "moe_flex_dispatcher_backend", None)
    return bool(getattr(args, "moe_enable_deepep", False)) or backend == "deepep"
