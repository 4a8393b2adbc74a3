"""Unmodified Megatron-LM, slime and miles on Moore Threads GPUs.

Call one function before the framework is imported::

    import musa_titan
    musa_titan.apply_pretrain_patch()
    import megatron...            # NVIDIA's own, unchanged

Nothing heavy is imported here, and neither torch nor Megatron by the call itself.
"""

from musa_titan.patching import boot as _boot

TYPE_CHECKING = False  # typing's own constant would cost an import
if TYPE_CHECKING:
    from musa_titan.patching.report import Report

__version__ = "0.1.0"
__all__ = ["apply_pretrain_patch", "apply_rl_patch", "report", "unapply"]


def apply_pretrain_patch() -> None:
    """Adapt Megatron-LM, from its first import on, to the device that ``ACCELERATOR_BACKEND`` names (unset: musa).

    Idempotent. Modules that are loaded already are patched at once and reported as ``late``.

    Raises:
        musa_titan.patching.spec.MusaTitanError: at the first import of torch or Megatron, if a setting is wrong, the
            device is not usable, or a patch does not fit the Megatron found.
    """
    _boot.activate("pretrain")


def apply_rl_patch() -> None:
    """Adapt slime, miles and the Megatron inside them, from their first import on.

    Idempotent, and may be called from within the import of slime or miles, which is where slime's own accelerator
    start-up calls it; ``torch.musa`` is usable once it returns then. Other processes of the job get their patches from
    ``SLIME_MUSA_PATCH_AT_STARTUP=1`` or ``MILES_MUSA_PATCH_AT_STARTUP=1``.

    Raises:
        musa_titan.patching.spec.MusaTitanError: at the first import of slime, miles or Megatron, if a setting is wrong,
            the device is not usable, or a patch does not fit what is found.
    """
    _boot.activate("rl")


def report() -> "Report":
    """What was done in this process: a :class:`musa_titan.patching.report.Report`, one record for each patch."""
    from musa_titan.patching.report import current_report

    return current_report()


def unapply() -> "list[str]":
    """Take every change back, last first; returns the names left alone because other code wrote there since."""
    return _boot.deactivate()
