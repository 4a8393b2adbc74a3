"""What the frameworks import of SGLang, without the machine SGLang is made for."""

from musa_titan.patching.spec import Patch

_WHY = (
    "it imports torchvision at the top, only to decode images; the wheel on PyPI is for CUDA and does not load beside "
    "a torch for the CPU: ModuleNotFoundError, or operator torchvision::nms does not exist"
)


def _without_torchvision(module: str) -> Patch:
    return Patch(
        id=f"sglang.without_torchvision.{module.rpartition('.')[2]}",
        kind="around_import",
        target=module,
        make="musa_titan.rl.common.sglang_repairs:torchvision_stand_in",
        when="musa_titan.rl.common.sglang_repairs:torchvision_absent",
        why=_WHY,
        remove_when="the module imports without torchvision",
    )


PATCHES = (
    _without_torchvision("sglang.srt.utils.common"),
    _without_torchvision("sglang.srt.multimodal.internvl_utils"),
)
