"""Where musa_titan enters a Megatron process: the argument parser, argument validation, distributed initialisation.

These are the only changes that stay in Megatron's modules when every feature is off (beside the accelerator's view of
torch). The third takes itself back once it has run, so none of them is called in a training step.
"""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="accelerator.autoload",
        kind="around_import",
        target="torch",
        make="musa_titan.accelerator.select:without_backend_autoload",
        why="torch imports an installed torch_musa by itself; a broken driver then ends even ACCELERATOR_BACKEND=cpu, "
        "with torch's traceback",
        remove_when="torch reports a device backend that cannot be loaded instead of raising",
    ),
    Patch(
        id="accelerator.view",
        kind="hook",
        target="torch",
        make="musa_titan.accelerator.select:install_view",
        why="Megatron addresses its device as torch.cuda, which only an NVIDIA build of torch has",
        remove_when="Megatron asks torch.accelerator for its device everywhere",
    ),
    Patch(
        id="entry.arguments",
        kind="wrap",
        target="megatron.training.arguments:add_megatron_arguments",
        make="musa_titan.pretrain.configure:add_our_arguments",
        why="the user's own training script must accept --musa-… flags without knowing musa_titan",
        remove_when="Megatron offers an entry point for argument groups of plugins",
    ),
    Patch(
        id="entry.validation",
        kind="wrap",
        target="megatron.training.arguments:validate_args",
        make="musa_titan.pretrain.configure:configure_after_validation",
        why="features may only be applied once Megatron's own arguments are final",
        remove_when="Megatron offers a callback after argument validation",
    ),
    Patch(
        id="entry.distributed",
        kind="wrap",
        target="megatron.core.parallel_state:initialize_model_parallel",
        make="musa_titan.pretrain.configure:check_ranks_before_groups",
        why="one node of thousands with another package or environment trains wrongly and silently",
        remove_when="never: this is our own check; it only needs a moment at which all ranks can talk",
    ),
)
