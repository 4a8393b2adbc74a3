"""Pretrain a GPT-like model with NVIDIA's own Megatron.

With ``MEGATRON_PATH`` set, this runs the ``pretrain_gpt.py`` of that checkout as it is; otherwise our small driver on
the ``megatron.training`` of the installed wheel. All flags are Megatron's, plus ``--musa-...`` (see ``--help``)::

    ACCELERATOR_BACKEND=cpu torchrun --nproc-per-node 2 examples/pretrain_gpt.py --transformer-impl local ...
"""

import os
import sys

import musa_titan

# Not under the guard below: workers that write checkpoints or load data import this file again, as ``__mp_main__``, and
# need the patches too.
musa_titan.apply_pretrain_patch()


def load_checkout_script(checkout: str) -> None:
    """Execute the checkout's ``pretrain_gpt.py`` in this module, so that spawned workers find us and its names here."""
    script = os.path.join(checkout, "pretrain_gpt.py")
    if not os.path.isfile(script):
        sys.exit(f"musa_titan: error: MEGATRON_PATH={checkout} has no pretrain_gpt.py")
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    sys.argv[0] = script
    with open(script, encoding="utf-8") as file:
        exec(compile(file.read(), script, "exec"), globals())


if os.environ.get("MEGATRON_PATH"):
    load_checkout_script(os.environ["MEGATRON_PATH"])
elif __name__ == "__main__":
    from musa_titan.pretrain.driver import main

    main()
