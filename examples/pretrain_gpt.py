"""Pretrain a GPT-like model with NVIDIA's own Megatron.

With ``MEGATRON_PATH`` set, this runs the ``pretrain_gpt.py`` of that checkout as it is; otherwise our small driver on
the ``megatron.training`` of the installed wheel. All flags are Megatron's, plus ``--musa-...`` (see ``--help``)::

    ACCELERATOR_BACKEND=cpu torchrun --nproc-per-node 2 examples/pretrain_gpt.py --transformer-impl local ...
"""

import os
import runpy
import sys

import musa_titan

# Not under the guard below: the workers that write checkpoints import this file again and need the patches too.
musa_titan.apply_pretrain_patch()


def main() -> None:
    """Hand over to Megatron."""
    checkout = os.environ.get("MEGATRON_PATH")
    if not checkout:
        from musa_titan.pretrain.driver import main as train

        train()
        return
    script = os.path.join(checkout, "pretrain_gpt.py")
    if not os.path.isfile(script):
        sys.exit(f"musa_titan: error: MEGATRON_PATH={checkout} has no pretrain_gpt.py")
    sys.path.insert(0, checkout)
    sys.argv[0] = script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
