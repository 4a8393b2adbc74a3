"""The binding's decisions that need no training run."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from musa_titan.patching.spec import MusaTitanError
from musa_titan.pretrain import p2p_binding, p2p_rules, p2p_sessions
from musa_titan.settings import settings_from_environment

BASE = {
    "pipeline_model_parallel_size": 2, "seq_length": 4096, "decoder_seq_length": None, "micro_batch_size": 1,
    "hidden_size": 7168, "params_dtype": torch.bfloat16, "context_parallel_size": 1, "tensor_model_parallel_size": 1,
    "sequence_parallel": False, "use_ring_exchange_p2p": False,
}  # fmt: skip


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**BASE, **changes})


def settings(**variables: str) -> Any:
    return settings_from_environment(
        {"MUSA_TITAN_P2P": "mooncake", **{f"MUSA_TITAN_P2P_{name}": value for name, value in variables.items()}}
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 58_720_256),
        ({"hidden_size": 8192}, 67_108_864),
        ({"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}, 58_720_256 // 4),
        ({"decoder_seq_length": 1024}, 58_720_256 // 4),
        ({"params_dtype": torch.float32, "micro_batch_size": 2}, 58_720_256 * 4),
        ({"fp32_residual_connection": True}, 58_720_256 * 2),
    ],
)
def test_the_slot_is_computed_from_megatrons_arguments(changes: dict[str, Any], expected: int) -> None:
    assert p2p_rules.activation_bytes_of(arguments(**changes)) == expected


@pytest.mark.parametrize(
    ("variables", "changes", "message"),
    [
        ({}, {"pipeline_model_parallel_size": 1}, "--pipeline-model-parallel-size is 1"),
        ({}, {"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p"),
        ({"SLOTS": "0"}, {}, "--musa-p2p-slots"),
        ({"SLOT_BYTES": "-5"}, {}, "--musa-p2p-slot-bytes"),
        ({"TIMEOUT": "-1"}, {}, "--musa-p2p-timeout"),
        ({"STRICT_SLOT": "1", "SLOT_BYTES": "58720255"}, {}, "Set --musa-p2p-slot-bytes 58720256"),
    ],
)
def test_wrong_use_is_refused_with_the_flag_to_change(
    variables: dict[str, str], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(MusaTitanError, match=message):
        p2p_rules.validate(settings(**variables), arguments(**changes))


def test_right_use_is_accepted() -> None:
    p2p_rules.validate(settings(), arguments())
    p2p_rules.validate(settings(SLOT_BYTES="1000"), arguments())
    p2p_rules.validate(settings(SLOT_BYTES="58720256", STRICT_SLOT="1"), arguments())


@pytest.mark.parametrize(
    ("variables", "changes", "seconds"),
    [
        ({}, {"distributed_timeout_minutes": 60}, 3600.0),
        ({"TIMEOUT": "5"}, {"distributed_timeout_minutes": 60}, 5.0),
        ({}, None, 600.0),
    ],
    ids=["of the process groups", "given", "without Megatron's arguments"],
)
def test_stages_wait_as_long_as_process_groups_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], changes: dict[str, Any] | None, seconds: float
) -> None:
    known = SimpleNamespace(_GLOBAL_ARGS=None if changes is None else arguments(**changes))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", known)  # type: ignore[arg-type]
    config = p2p_sessions.config_from(SimpleNamespace(settings=settings(**variables)))  # type: ignore[arg-type]
    assert (config.timeout, config.start_timeout) == (seconds, seconds)


def test_off_by_default_and_by_name() -> None:
    assert not settings_from_environment({}).enabled("p2p")
    assert not settings_from_environment({"MUSA_TITAN_P2P": "default"}).enabled("p2p")
    assert settings().enabled("p2p")


def test_asking_what_is_missing_imports_neither_torch_nor_mooncake() -> None:
    code = (
        "import sys, musa_titan.pretrain.p2p_rules as rules; print(rules.missing());"
        "print([name for name in ('torch', 'mooncake.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["None", "[]"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p_rules.ctypes.util, "find_library", lambda name: None if name == "numa" else name)
    assert p2p_rules.missing() == "Mooncake needs libnuma: apt-get install libnuma1"
    monkeypatch.setattr(p2p_rules.importlib.util, "find_spec", lambda name: None)
    assert "pip install mooncake-transfer-engine-non-cuda" in (p2p_rules.missing() or "")


class Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


def communicator_class(monkeypatch: pytest.MonkeyPatch, session: Any) -> type:
    """A communicator as upstream's, with our two wraps."""
    monkeypatch.setattr(p2p_binding, "session_of", lambda group, context: session)

    def plain_init(self: Any, pp_group: Any, config: Any) -> None:
        self.pp_group, self.config = pp_group, config

    def plain_communicate(self: Any, **arguments: Any) -> str:
        return "default"

    context: Any = None
    return type("Communicator", (), {
        "__init__": p2p_binding.with_session(plain_init, context),
        "_communicate": p2p_binding.through_slots(plain_communicate, context),
    })  # fmt: skip


NOTHING = {
    "tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False, "tensor_shape": None,
}  # fmt: skip


def test_communicators_of_multi_module_models_and_of_one_stage_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = communicator_class(monkeypatch, session=object())

    def build(self: Any) -> None:
        self.inner = made(Group(2), None)

    multi = type("MultiModule", (), {"__init__": p2p_binding.without_sessions(build, None)})()  # type: ignore[arg-type]
    assert multi.inner._communicate(**NOTHING) == "default"
    assert made(Group(1), None)._communicate(**NOTHING) == "default"
    assert made(Group(2), None)._communicate(**NOTHING) == (None, None, None)
    assert made(Group(2), None)._communicate(**NOTHING, wait_on_reqs=False) == (None, None, {})


def test_after_a_common_fallback_communicators_are_the_default_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    made = communicator_class(monkeypatch, session=None)
    assert made(Group(2), None)._communicate(**NOTHING) == "default"


def test_a_communicator_older_than_the_settings_gets_its_session_at_its_first_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = communicator_class(monkeypatch, session=object())
    early = made.__new__(made)
    early.pp_group, early.config = Group(2), None
    assert early._communicate(**NOTHING) == (None, None, None)


def test_a_receive_without_a_shape_or_dtype_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = communicator_class(monkeypatch, session=SimpleNamespace(rank=3))
    config = SimpleNamespace(pipeline_dtype=None)
    with pytest.raises(MusaTitanError, match=r"rank 3, receive forward: .* pipeline_dtype None and shape \(1,\)"):
        made(Group(2), config)._communicate(**{**NOTHING, "recv_prev": True, "tensor_shape": (1,)})
