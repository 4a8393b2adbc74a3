"""Token dispatch by a ``deep_ep`` that works here.

Megatron's flex dispatcher is complete, but for the package that moves the tokens: ``moe/fused_a2a.py`` imports DeepEP
by name, and defines its functions only if that succeeded. So the one change is to let that module execute once more
when the feature is on, with our ``deep_ep`` importable. Nothing of it is patched.
"""

from musa_titan.patching.spec import Patch

PATCHES = (
    Patch(
        id="dispatch.deep_ep",
        kind="hook",
        target="megatron.core.transformer.moe.fused_a2a",
        make="musa_titan.pretrain.dispatch_binding:provide_deep_ep",
        feature="dispatch",
        layer="comm",
        phase="configured",
        why="NVIDIA's DeepEP does not build here, and MT-DeepEP lacks names that Megatron uses: 'not installed'",
        remove_when="Megatron's flex dispatcher imports and trains with the deep_ep of the machine as it is",
    ),
)
