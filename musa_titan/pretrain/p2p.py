"""Pipeline transfers through Mooncake instead of the collective library.

Upstream sends activations and gradients with ``isend``/``irecv`` of the pipeline's process group. On a GPU these are
kernels: they occupy compute units and queue behind the stage's own work, at 31 stages twice per micro-batch and stage.
All of ``P2PCommunicator`` goes through its method ``_communicate``; that is the one place changed. Schedules build a
new communicator in every step, all stages at the same point and before they compute, so that is where a session is
looked up, and opened the first time.
"""

from musa_titan.patching.spec import Patch

_COMMUNICATOR = "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator"
_PARAMETERS = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs")

PATCHES = (
    Patch(
        id="p2p.session",
        kind="wrap",
        target=f"{_COMMUNICATOR}.__init__",
        make="musa_titan.pretrain.p2p_binding:with_session",
        feature="p2p",
        layer="comm",
        phase="configured",
        parameters=("pp_group", "config"),
        why="a session needs all stages at once; inside the first transfer some are still computing",
        remove_when="Megatron takes a factory of communicators",
    ),
    Patch(
        id="p2p.communicate",
        kind="wrap",
        target=f"{_COMMUNICATOR}._communicate",
        make="musa_titan.pretrain.p2p_binding:through_slots",
        feature="p2p",
        layer="comm",
        phase="configured",
        parameters=_PARAMETERS,
        why="it knows two ways, batched and single isend/irecv of the process group, and no third can be given to it",
        remove_when="Megatron takes a factory of communicators",
    ),
    Patch(
        id="p2p.multimodule",
        kind="wrap",
        target="megatron.core.pipeline_parallel.multimodule_communicator:MultiModulePipelineCommunicator.__init__",
        make="musa_titan.pretrain.p2p_binding:without_sessions",
        feature="p2p",
        layer="comm",
        phase="configured",
        required=False,
        why="it builds a P2PCommunicator for each of several modules, whose shapes and groups are not the pipeline's",
        remove_when="never: it marks communicators that are to stay as they are",
    ),
    Patch(
        id="p2p.close",
        kind="hook",
        target="torch.distributed",
        make="musa_titan.pretrain.p2p_binding:close_before_destroy",
        feature="p2p",
        layer="comm",
        phase="configured",
        why="what was sent last must be delivered, and neighbours told, before a program takes its groups apart",
        remove_when="never: this ends our own sessions",
    ),
)
