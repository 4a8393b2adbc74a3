"""``python -m musa_titan.rl.checkpoint``: the conversions of ``convert.py`` as a command, one process on a CPU.

The arguments after ``--`` are those of the training run; they tell the shape of the model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from musa_titan.patching.spec import MusaTitanError

USAGE = """python -m musa_titan.rl.checkpoint {to-megatron,to-hf} FRAMEWORK FROM TO -- ARGUMENTS OF THE TRAINING RUN"""


class SafetensorsFolder(Mapping[str, Any]):
    """The tensors of a Hugging Face checkpoint, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise MusaTitanError(f"no safetensors files in {folder}")
        self._open: list[Any] = [safe_open(str(file), "pt") for file in files]
        self._where = {name: file for file in self._open for name in file.keys()}  # noqa: SIM118 (it is no dict)

    def __getitem__(self, name: str) -> Any:
        return self._where[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _framework(framework: str, name: str) -> Any:
    return importlib.import_module(f"{framework}.{name}")


def _build(framework: str, arguments: list[str]) -> tuple[Any, list[Any]]:
    """(arguments, model chunks) of a training run in this one process."""
    sys.argv = ["train.py", *arguments]
    args = _framework(framework, "utils.arguments").parse_args()
    if args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.expert_model_parallel_size != 1:
        raise MusaTitanError("a conversion runs in one process: leave the parallel sizes out of its arguments")
    import torch.distributed as dist
    from megatron.core.enums import ModelType
    from megatron.training.training import get_model
    from torch._C._distributed_c10d import HashStore

    args.rank, args.world_size = 0, 1
    os.environ.setdefault("RANK", "0")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    _framework(framework, "utils.distributed_utils").init_gloo_group()
    _framework(framework, "backends.megatron_utils.initialize").init(args)
    provider = _framework(framework, "backends.megatron_utils.model_provider").get_model_provider_func(args)
    return args, get_model(provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)


def _converter(framework: str, args: Any) -> Any:
    from transformers import AutoConfig

    convert = _framework(framework, "backends.megatron_utils.megatron_to_hf").convert_to_hf
    config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
    name = getattr(args, "model_name", None) or type(config).__name__.lower()
    return lambda parameter, tensor: convert(args, name, parameter, tensor)


def _named(framework: str, args: Any, model: list[Any]) -> Any:
    return _framework(framework, "backends.megatron_utils.update_weight.common").named_params_and_buffers(args, model)


def to_megatron(framework: str, source: Path, target: Path, arguments: list[str]) -> None:
    """Read the Hugging Face checkpoint `source`, write ``torch_dist`` into `target` with the tracker ``release``."""
    args, model = _build(
        framework, [*arguments, "--hf-checkpoint", str(source), "--save", str(target), "--save-interval", "1"]
    )
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename, save_checkpoint

    from musa_titan.rl.convert import fill_from_hf

    tensors = SafetensorsFolder(source)
    used = fill_from_hf(_named(framework, args, model), _converter(framework, args), tensors)
    unused = set(tensors) - used
    if unused:
        raise MusaTitanError(f"{len(unused)} tensors of {source} have no place in the model, first {min(unused)}")
    args.no_save_optim = args.no_save_rng = True
    save_checkpoint(1, model, None, None, num_floating_point_operations_so_far=0)
    written = get_checkpoint_name(str(target), 1, release=False, return_base_dir=True)
    os.replace(written, get_checkpoint_name(str(target), -1, release=True, return_base_dir=True))
    Path(get_checkpoint_tracker_filename(str(target))).write_text("release")


def to_hf(framework: str, source: Path, target: Path, arguments: list[str]) -> None:
    """Read the ``torch_dist`` checkpoint `source`, write safetensors into `target` with the model's other files."""
    args, model = _build(
        framework, [*arguments, "--load", str(source), "--no-load-optim", "--no-load-rng", "--finetune"]
    )
    import shutil

    from safetensors.torch import save_file

    _framework(framework, "backends.megatron_utils.checkpoint").load_checkpoint(
        model, None, None, checkpointing_context={}, skip_load_to_model_and_opt=False
    )
    converter = _converter(framework, args)
    pairs = (pair for name, tensor in _named(framework, args, model) for pair in converter(name, tensor.data))
    like = SafetensorsFolder(Path(args.hf_checkpoint))  # whose types it keeps: Megatron holds some buffers in fp32
    tensors = {name: tensor.to(like[name].dtype).contiguous().clone() for name, tensor in pairs}
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(target / "model.safetensors"), metadata={"format": "pt"})
    for file in Path(args.hf_checkpoint).iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy2(file, target)
    print(json.dumps({"tensors": len(tensors), "folder": str(target)}))


def main() -> None:
    """Parse our part; what follows ``--`` is the framework's."""
    parser = argparse.ArgumentParser(usage=USAGE, description=__doc__)
    parser.add_argument("direction", choices=("to-megatron", "to-hf"))
    parser.add_argument("framework", choices=("slime", "miles"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    words = sys.argv[1:]
    ours = words.index("--") if "--" in words else len(words)
    asked = parser.parse_args(words[:ours])
    import musa_titan

    musa_titan.apply_rl_patch()
    convert = to_megatron if asked.direction == "to-megatron" else to_hf
    convert(asked.framework, asked.source, asked.target, words[ours + 1 :])


if __name__ == "__main__":
    main()
