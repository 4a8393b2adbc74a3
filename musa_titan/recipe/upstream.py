"""What the installed Megatron makes of a command line: its own parser, validation and pipeline split.

``python -m musa_titan.recipe.upstream`` imports Megatron once and answers one JSON line for each JSON line on its
standard input; every command line gets a process of its own, since validation leaves global state behind. It runs on
any machine: ``ACCELERATOR_BACKEND=cpu``, no process group, no model. Where Transformer Engine is missing, its version
gates are taken as met, because the job runs elsewhere; the answer says so.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import musa_titan
from musa_titan.recipe.successors import advice

Answer = dict[str, Any]
_FOR_MODELS = ("megatron.core.tokenizers.text", "musa_titan.pretrain.driver")
"""What building a model needs beside parsing flags, imported before the processes part."""


def main() -> None:
    musa_titan.apply_pretrain_patch()
    importlib.import_module("megatron.training.arguments")  # paid once, inherited by every child
    assume_te = _assume_transformer_engine()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints must not get between our lines
    for line in sys.stdin:
        question = json.loads(line)
        work = examine
        if "ranks" in question:
            work = build
            for name in _FOR_MODELS:
                importlib.import_module(name)
        answer = _in_child(lambda work=work, question=question: work(question))  # type: ignore[misc]
        answers.write(json.dumps({**answer, "te_assumed": assume_te}) + "\n")
        answers.flush()


def examine(question: Answer) -> Answer:
    """`question`: argv, world_size, environment. The answer has what could be found out, and the first error."""
    from musa_titan.pretrain.upstream import megatron_version

    os.environ.update(question["environment"], WORLD_SIZE=str(question["world_size"]), RANK="0", LOCAL_RANK="0")
    answer: Answer = {"version": megatron_version(), "unknown": {}, "error": None, "arguments": None, "stages": None}
    try:
        options = _option_strings()
        known, unknown = split_known(question["argv"], options)
        answer["unknown"] = {flag: advice(flag, options) for flag in unknown}
        args = _validated(known)
        answer["arguments"] = _plain(vars(args))
        answer["stages"] = stages(args)
    except (Exception, SystemExit) as error:
        answer["error"] = _one_line(error)
    return answer


def build(question: Answer) -> Answer:
    """Build the model of some ranks of a large job on the meta device: numbers of parameters, or the first error.

    Megatron's fake process group lets one process be any rank. Arguments are validated once; each rank gets a process.
    """
    os.environ.update(question["environment"], WORLD_SIZE=str(question["world_size"]))
    os.environ.update(RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    sys.argv = ["recipe", *question["argv"]]
    try:
        from megatron.training import arguments

        args = arguments.parse_and_validate_args()
    except (Exception, SystemExit) as error:
        return {"parameters": None, "error": _one_line(error)}
    parameters = []
    for rank in question["ranks"]:
        answer = _in_child(lambda rank=rank: _build_rank(args, rank))  # type: ignore[misc]
        if answer["error"] is not None:
            return {"parameters": None, "error": f"rank {rank}: {answer['error']}"}
        parameters.append(answer["parameters"])
    return {"parameters": parameters, "error": None}


def _build_rank(args: argparse.Namespace, rank: int) -> Answer:
    """The CPU view's table of devices is pointed at the meta device: what Megatron puts on its GPU takes no memory."""
    from megatron.core import parallel_state
    from megatron.training import initialize

    from musa_titan.accelerator.cpu.devices import HOST, REAL_DEVICE
    from musa_titan.pretrain import driver

    args.rank = rank
    os.environ["RANK"] = str(rank)
    try:
        initialize.initialize_megatron()
        for name in (0, "cuda", "cuda:0"):
            HOST[name] = REAL_DEVICE("meta")
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), args.pipeline_model_parallel_size
        chunks = args.virtual_pipeline_model_parallel_size or 1
        parameters = 0
        with REAL_DEVICE("meta"):
            for chunk in range(chunks):
                model = driver.build_model(
                    pre_process=stage == chunk == 0,
                    post_process=stage == stages - 1 and chunk == chunks - 1,
                    vp_stage=chunk if chunks > 1 else None,
                )
                if not all(parameter.is_meta for parameter in model.parameters()):
                    raise RuntimeError("a parameter was not built on the meta device")
                parameters += sum(parameter.numel() for parameter in model.parameters())
    except (Exception, SystemExit) as error:
        return {"parameters": None, "error": _one_line(error)}
    return {"parameters": parameters, "error": None}


def split_known(argv: list[str], options: set[str]) -> tuple[list[str], list[str]]:
    """`argv` without the flags (and their values) that are not among `options`, and those flags."""
    known: list[str] = []
    unknown: list[str] = []
    keep = True
    for word in argv:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            keep = flag in options
            if not keep:
                unknown.append(flag)
        if keep:
            known.append(word)
    return known, unknown


def stages(args: argparse.Namespace) -> list[list[Answer]]:
    """Per pipeline rank and model chunk: ids of its decoder layers, and whether embedding, head and MTP are there."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    ranks = args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    found = []
    for rank in range(ranks):
        row = []
        for chunk in range(chunks):
            with _standing_at(rank, ranks, chunk, chunks):
                stage = chunk if chunks > 1 else None
                number = get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
            first, last = rank == chunk == 0, rank == ranks - 1 and chunk == chunks - 1
            mtp = _mtp_here(config, rank, chunk, last)
            row.append({"layers": list(range(offset, offset + number)), "embedding": first, "head": last, "mtp": mtp})
        found.append(row)
    return found


def _mtp_here(config: Any, rank: int, chunk: int, last: bool) -> int:
    layout = getattr(config, "pipeline_model_parallel_layout", None)
    if layout is None:
        return (config.mtp_num_layers or 0) if last else 0
    from megatron.core.transformer.enums import LayerType

    return int(layout.layout[rank][chunk].count(LayerType.mtp))


@contextlib.contextmanager
def _standing_at(rank: int, ranks: int, chunk: int, chunks: int) -> Iterator[None]:
    """Megatron's layer split asks its global state where this process is; there is no process group here."""
    from megatron.core import parallel_state

    setters: list[tuple[Callable[[Any], None], Any]] = [
        (parallel_state.set_pipeline_model_parallel_rank, rank),
        (parallel_state.set_pipeline_model_parallel_world_size, ranks),
        (parallel_state.set_virtual_pipeline_model_parallel_world_size, chunks if chunks > 1 else None),
        (parallel_state.set_virtual_pipeline_model_parallel_rank, chunk if chunks > 1 else None),
    ]
    for setter, value in setters:
        setter(value)
    try:
        yield
    finally:
        for setter, _ in setters:
            setter(None)


def _validated(argv: list[str]) -> argparse.Namespace:
    from megatron.training import arguments

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(message)

    argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
    sys.argv = ["recipe", *argv]
    args: argparse.Namespace = arguments.parse_args()
    arguments.validate_args(args, {})
    return args


def _option_strings() -> set[str]:
    from megatron.training import arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return set(parser._option_string_actions)


def _assume_transformer_engine() -> bool:
    """Let the gates of a missing Transformer Engine pass: its version, and the fused functions it would bring."""
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        return False
    for name, module in list(sys.modules.items()):
        if not name.startswith("megatron."):
            continue
        if hasattr(module, "is_te_min_version"):
            setattr(module, "is_te_min_version", lambda *args, **kwargs: True)  # noqa: B010  (a module unknown to mypy)
        for attribute, value in list(vars(module).items()):
            if attribute.startswith("fused_") and value is None:
                setattr(module, attribute, _never_called)
    return True


def _never_called(*args: Any, **kwargs: Any) -> NoReturn:
    raise AssertionError("a check of flags runs no model")


def _in_child(work: Callable[[], Answer]) -> Answer:
    """The result of `work`, computed in a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with os.fdopen(writing, "w") as stream:
                stream.write(json.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"version": "", "unknown": {}, "arguments": None, "stages": None, "error": f"ended with status {status}"}
    answer: Answer = json.loads(text)
    return answer


def _plain(value: Any) -> Any:
    """`value` as JSON has it; what JSON has not becomes its text."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return str(value)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, (AssertionError, ValueError, RuntimeError)) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
