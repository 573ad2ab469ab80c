"""Every private name of torch that mezzo uses, by the feature that needs it.

No other module uses a name of torch that starts with an underscore: `from mezzo._torch import
get_schema` gives `torch._C._get_schema`. A name is looked up when it is first imported from here,
so that slow parts of torch (Inductor, dynamo, the serializer of torch.export) load only when they
are used.

A name that this torch does not have raises nothing on import. Its replacement raises an
`UnsupportedError` with the feature when it is used. Names in `_SUBSTITUTES` have a substitute
instead; None means that the importing module works without the name.

>>> require("conversion")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn

from mezzo._errors import UnsupportedError

if TYPE_CHECKING:
    from torch._export.serde import schema, serialize
    from torch._export.serde.union import _Union as Union
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "CustomGraphPass",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "Union",
    "pytree",
    "schema",
    "serialize",
]
"""The names that have types. For a type checker the others are `Any`."""

FIRST, LAST = "2.11", "2.15"
"""The versions of torch that the tests run on."""

_FOREACH = (
    "abs add_ addcmul_ clamp_max_ clamp_min_ copy_ div div_ lerp_ maximum_ mul mul_ neg norm sign"
    " sign_ sqrt_ sub_ zero_"
).split()

FEATURES: Mapping[str, Mapping[str, str]] = {
    "op registry": {
        "OpOverload": "torch._ops.OpOverload",
        "OpOverloadPacket": "torch._ops.OpOverloadPacket",
        "functions": "torch._C._VariableFunctions",
        "nn_functions": "torch._C._nn",
        "get_schema": "torch._C._get_schema",
        "all_op_names": "torch._C._dispatch_get_all_op_names",
    },
    "support for policies with rules of their own": {
        "function_mode_count": "torch._C._len_torch_function_stack",
        "function_mode_at": "torch._C._get_function_stack_at",
        "boolean_dispatched": "torch._jit_internal.boolean_dispatched",
        "has_kernel": "torch._C._dispatch_has_kernel_for_dispatch_key",
        "kernels_of": "torch._C._dispatch_get_registrations_for_dispatch_key",
    },
    "weight cache": {
        "is_functorch_tensor": "torch._C._functorch.is_functorch_wrapped_tensor",
    },
    "layers that keep fewer tensors for backward": {
        "transforms_are_active": "torch._C._are_functorch_transforms_active",
    },
    "float32 fallback": {
        "DispatchKey": "torch._C.DispatchKey",
        "DispatchKeySet": "torch._C.DispatchKeySet",
        "ExcludeDispatchKeyGuard": "torch._C._ExcludeDispatchKeyGuard",
        "keys_below": "torch._C._dispatch_keyset_full_after",
    },
    "support for compiled regions": {
        "FrameAction": "torch._C._dynamo.eval_frame._FrameAction",
        "FrameExecStrategy": "torch._C._dynamo.eval_frame._FrameExecStrategy",
        "set_code_exec_strategy": "torch._C._dynamo.eval_frame.set_code_exec_strategy",
        "CompileContext": "torch._guards.CompileContext",
    },
    "support for checkpointing in a compiled region": {
        "dynamo_config": "torch._dynamo.config",
    },
    "support for policies with rules of their own in compiled code": {
        "dynamo_overridable_functions": "torch._dynamo.variables.torch.get_overridable_functions",
    },
    "support for compiled models": {
        "OptimizedModule": "torch._dynamo.eval_frame.OptimizedModule",
    },
    "support for checkpointing in a region": {
        "checkpoint_generator": "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "checkpoint_generator_impl": (
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator_impl"
        ),
    },
    "support for torch.export in a region": {
        "export": "torch.export._trace._export",
    },
    "support for TorchScript": {
        "ScriptMethod": "torch._C.ScriptMethod",
        "qualified_name": "torch._jit_internal._qualified_name",
        "recursive_compile_class": "torch.jit._script._recursive_compile_class",
    },
    "key for torch's cache of compiled code": {
        "AOTAutogradCacheDetails": (
            "torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails"
        ),
        "autocast_devices": "torch._C._autocast_supported_devices",
    },
    "handling of nested inputs": {
        "pytree": "torch.utils._pytree",
    },
    "observer": {
        "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
        "current_autograd_node": "torch._C._current_autograd_node",
        "next_sequence_number": "torch._C._autograd._get_sequence_nr",
        "after_backward": "torch.autograd.Variable._execution_engine.queue_callback",
    },
    "gradient check": {
        "check_and_unscale_": "torch._amp_foreach_non_finite_check_and_unscale_",
    },
    "scale update": {
        "update_scale_": "torch._amp_update_scale_",
    },
    "math on lists of tensors": {f"foreach_{name}": f"torch._foreach_{name}" for name in _FOREACH},
    "checkpoints of DistributedDataParallel": {
        "default_store": "torch.distributed.distributed_c10d._get_default_store",
    },
    "CUDA graphs": {
        "raw_stream": "torch._C._cuda_getCurrentRawStream",
        "clear_cublas_workspaces": "torch._C._cuda_clearCublasWorkspaces",
        "end_allocate_to_pool": "torch._C._cuda_endAllocateToPool",
        "release_pool": "torch._C._cuda_releasePool",
    },
    "observer of captured steps": {
        "dispatch_mode_count": "torch._C._len_torch_dispatch_stack",
    },
    "profiler ranges": {
        "is_profiler_enabled": "torch._C._autograd._profiler_enabled",
    },
    "mezzo compare": {
        # The setter of torch.backends.cudnn raises in processes that import torch.testing.
        "set_cudnn_allow_tf32": "torch._C._set_cudnn_allow_tf32",
    },
    "compile=True": {
        "inductor_config": "torch._inductor.config",
        "CustomGraphPass": "torch._inductor.custom_graph_pass.CustomGraphPass",
        "get_hash_for_files": "torch._inductor.custom_graph_pass.get_hash_for_files",
    },
    "conversion": {
        "HigherOrderOperator": "torch._ops.HigherOrderOperator",
        "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
        "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
        "enable_python_dispatcher": "torch._dispatch.python.enable_python_dispatcher",
        "wrap_with_autocast": "torch._higher_order_ops.wrap.wrap_with_autocast",
        "tree_flatten_spec": "torch.fx._pytree.tree_flatten_spec",
        "assert_tensor_metadata": "torch.ops.aten._assert_tensor_metadata",
    },
    "conversion of recurrent layers for CUDA": {
        "flatten_cudnn_weights": "torch._cudnn_rnn_flatten_weight",
        "uses_flat_cudnn_weights": "torch._use_cudnn_rnn_flatten_weight",
    },
    "ONNX export": {
        "batch_norm_functional": "torch.ops.aten._native_batch_norm_legit_functional",
    },
    "file format of converted programs": {
        "schema": "torch._export.serde.schema",
        "serialize": "torch._export.serde.serialize",
        "Union": "torch._export.serde.union._Union",
    },
    "MXNet arrays": {
        "is_torch_function_enabled": "torch._C._is_torch_function_enabled",
    },
    "static programs": {
        "DisableTorchFunctionSubclass": "torch._C.DisableTorchFunctionSubclass",
    },
    "statistics of ops without those of the observer": {
        "DisableTorchDispatch": "torch._C._DisableTorchDispatch",
    },
    "sampling of activations": {
        "DisableTorchFunction": "torch._C.DisableTorchFunction",
    },
}
"""What each feature needs: the name in this module, and the dotted name in torch."""

PARTS: Mapping[str, Sequence[str]] = {
    "torch.utils._pytree": (
        "NO_SERIALIZED_TYPE_NAME_FOUND SERIALIZED_TYPE_TO_PYTHON_TYPE SUPPORTED_SERIALIZED_TYPES"
        " TreeSpec is_namedtuple_class keystr tree_flatten tree_leaves tree_leaves_with_path"
        " tree_map tree_map_only tree_structure tree_unflatten"
    ).split(),
    "torch._export.serde.schema": ("ExportedProgram", "Layout", "SCHEMA_VERSION"),
    "torch._export.serde.serialize": ("ExportedProgramDeserializer", "serialize"),
    "torch._inductor.config": ("pre_grad_custom_pass",),
    "torch._dynamo.config": ("skip_fwd_side_effects_in_bwd_under_checkpoint",),
}
"""The names that are used of each module. A module that lacks one of them counts as missing."""


EXPORT_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers that torch.export writes to when a model cannot be traced."""
ONNX_LOGGER = "torch.onnx._internal.exporter"
"""The logger of torch's ONNX exporter."""
PICKLED_REBUILDS = (
    "torch._tensor _rebuild_from_type_v2",
    "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state",
    "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_wrapper_subclass",
)
"""Functions that pickles of tensors call, as module and name."""
SYMBOLIC_SQRT = "torch._sym_sqrt"
"""The square root of a symbolic size, as a saved graph names it."""


def __getattr__(name: str) -> Any:
    """Look up a name when it is first imported."""
    for feature, names in FEATURES.items():
        if name in names:
            found = globals()[name] = _public(name) or _look_up(names[name], feature, name)
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require(feature: str) -> None:
    """Raise `UnsupportedError` if this torch lacks a name that a feature needs."""
    if missing := _first_missing(feature):
        _raise_unsupported(feature, missing)


def lacks(feature: str) -> bool:
    """Return whether this torch lacks a name of a feature that is left out without an error."""
    return _first_missing(feature) is not None


@cache
def place(name: str) -> tuple[str, str]:
    """Return the module of torch that holds a name, and the attribute, for code that patches it.

    >>> place("export")
    ('torch.export._trace', '_export')
    """
    dotted = next(names[name] for names in FEATURES.values() if name in names)
    module, _, attribute = dotted.rpartition(".")
    return module, attribute


def loaded(name: str) -> Any:
    """Return a name if torch has imported its module, else None.

    Avoids importing dynamo (seconds) only to learn whether an object comes from it.
    """
    module, attribute = place(name)
    return getattr(sys.modules.get(module), attribute, None)


# -- look-up ---------------------------------------------------------------------------------------


@cache
def _first_missing(feature: str) -> str | None:
    """Return the first dotted name that a feature needs and this torch lacks."""
    found = (_read(dotted) for dotted in FEATURES[feature].values())
    return next((missing for _, missing in found if missing is not None), None)


def _look_up(dotted: str, feature: str, name: str) -> Any:
    found, missing = _read(dotted)
    if missing is None:
        return found
    if name in _SUBSTITUTES:
        return _SUBSTITUTES[name]
    return _Missing(name, (), {"feature": feature, "missing": missing})


def _read(dotted: str) -> tuple[Any, str | None]:
    """Return the object with a dotted name, and the dotted name that is missing, if one is."""
    found, path = torch, "torch"
    for part in dotted.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else import_module(path)
        except ImportError:
            return None, dotted
    missing = (part for part in PARTS.get(dotted, ()) if not hasattr(found, part))
    return found, next((f"{dotted}.{part}" for part in missing), None)


def _raise_unsupported(feature: str, missing: str) -> NoReturn:
    raise UnsupportedError(
        f"mezzo's {feature} needs {missing}, which torch {torch.__version__} does not have. Use"
        f" torch {FIRST} to {LAST}."
    )


class _Missing(type):
    """Metaclass of the replacement for a missing name.

    The replacement is a class, so that it can be a base class and an argument of `isinstance`. Any
    other use raises `UnsupportedError`.
    """

    feature: str
    missing: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        _raise_unsupported(cls.feature, cls.missing)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _raise_unsupported(cls.feature, cls.missing)

    def __contains__(cls, _: object) -> bool:
        _raise_unsupported(cls.feature, cls.missing)

    def __getitem__(cls, _: object) -> Any:
        _raise_unsupported(cls.feature, cls.missing)


# -- substitutes -----------------------------------------------------------------------------------


def _public(name: str) -> Any:
    """Return the public function for a name, if this torch has one: torch.foreach, since 2.15."""
    if not name.startswith("foreach_"):
        return None
    return getattr(getattr(torch, "foreach", None), name.removeprefix("foreach_"), None)


def _one_by_one(name: str) -> Callable[..., list[Any]]:
    """Return a loop over tensors that does what `torch._foreach_<name>` does."""
    method: Callable[..., Any] = _METHODS[name] if name in _METHODS else getattr(torch.Tensor, name)

    def run(tensors: Sequence[torch.Tensor], *operands: Any, **options: Any) -> list[Any]:
        rows = [
            operand if isinstance(operand, list | tuple) else [operand] * len(tensors)
            for operand in operands
        ]
        return [
            method(tensor, *row, **options) for tensor, *row in zip(tensors, *rows, strict=True)
        ]

    return run


_METHODS: dict[str, Callable[..., Any]] = {
    "maximum_": lambda tensor, other: torch.maximum(tensor, other, out=tensor),
    "norm": torch.linalg.vector_norm,
}


def _no_modes() -> int:
    """Return 0: where modes cannot be counted, policies that need one raise UnsupportedError."""
    return 0


def _current_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _always() -> bool:
    """Return True: where it is not known whether a profiler runs, ranges are recorded."""
    return True


def _known_autocast_devices() -> list[str]:
    return [
        device
        for device in ("cpu", "cuda", "mps", "xpu")
        if torch.amp.is_autocast_available(device)
    ]


_SUBSTITUTES: dict[str, Any] = {
    **{f"foreach_{name}": _one_by_one(name) for name in _FOREACH},
    "function_mode_count": _no_modes,
    "dispatch_mode_count": _no_modes,
    "DisableTorchDispatch": nullcontext,
    "raw_stream": _current_stream,
    "is_profiler_enabled": _always,
    "autocast_devices": _known_autocast_devices,
    "functions": torch,
    "nn_functions": nn.functional,
    "update_scale_": None,
    "set_code_exec_strategy": None,
    "FrameAction": None,
    "FrameExecStrategy": None,
    "CompileContext": None,
    "dynamo_config": None,
    "checkpoint_generator": None,
    "checkpoint_generator_impl": None,
    "export": None,
    "ScriptMethod": None,
    "qualified_name": None,
    "recursive_compile_class": None,
    "AOTAutogradCacheDetails": None,
    "assert_tensor_metadata": None,
}


def _shared_base(*kinds: type[nn.Module]) -> type[nn.Module]:
    return next(
        base
        for base in kinds[0].__mro__
        if issubclass(base, nn.Module) and all(issubclass(kind, base) for kind in kinds)
    )


# torch's base classes of norms are private: find them as the base that public ones share.
BatchNorm = _shared_base(nn.BatchNorm1d, nn.BatchNorm2d)
InstanceNorm = _shared_base(nn.InstanceNorm1d, nn.InstanceNorm2d)
BatchOrInstanceNorm = _shared_base(BatchNorm, InstanceNorm)


# -- schedulers ------------------------------------------------------------------------------------


def has_closed_form(scheduler: object) -> bool:
    """Return whether a scheduler can compute its rates from the step alone."""
    return hasattr(scheduler, "_get_closed_form_lr")


def closed_form_rates(scheduler: Any) -> list[Any]:
    """Return the learning rates at `scheduler.last_epoch`, of a scheduler with a closed form."""
    return list(scheduler._get_closed_form_lr())


# -- hooks -----------------------------------------------------------------------------------------


_HOOKS = {
    "module": ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    "parameter": ("_backward_hooks", "_post_accumulate_grad_hooks"),
    "optimizer": ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
}


def hook_tables(
    modules: Sequence[Any], parameters: Sequence[Any], optimizers: Sequence[Any]
) -> list[dict[int, Any]]:
    """Return the hooks of modules, parameters and optimizers, by the ids of their handles."""
    kinds = {"module": modules, "parameter": parameters, "optimizer": optimizers}
    tables = (
        getattr(owner, name, None)
        for kind, owners in kinds.items()
        for owner in owners
        for name in _HOOKS[kind]
    )
    return [table for table in tables if table is not None]


# -- places of ops ---------------------------------------------------------------------------------


def sequence_number(node: Any) -> int:
    """Return the number of an autograd node: nodes of a thread are numbered as they are made."""
    return int(node._sequence_nr())


def line_modules(graph: torch.fx.GraphModule) -> dict[int, str]:
    """Return the module path of each line of a graph's code, counted from its first line.

    Empty if torch keeps no map of lines.
    """
    nodes = list(graph.graph.nodes)
    lines: dict[int, int] = getattr(graph, "_lineno_map", None) or {}
    stacks = {line: nodes[index].meta.get("nn_module_stack") for line, index in lines.items()}
    return {line: [*stack.values()][-1][0] if stack else "" for line, stack in stacks.items()}


# -- DistributedDataParallel -----------------------------------------------------------------------


def communication_hooks(wrapper: nn.Module) -> list[tuple[Callable[..., Any], Any]]:
    """Return the hooks of a DistributedDataParallel wrapper, each with its state.

    torch has no public way to read them.
    """
    hooks: list[tuple[Callable[..., Any], Any]] = wrapper._comm_hooks  # type: ignore[assignment]
    return hooks


_NEVER = 2**31 - 1
"""A sample rate that no run reaches."""


def reducer_refusal(wrapper: Any) -> str | None:
    """Return why `renew_reducer` cannot be called for a DistributedDataParallel wrapper, if so."""
    names = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_ddp_init_helper")
    missing = [name for name in names if not hasattr(wrapper, name)]
    if missing:
        return f"torch {torch.__version__} has no DistributedDataParallel.{missing[0]}"
    # Hooks in C++ are not among `communication_hooks`, and a new reducer would not have them.
    logged = wrapper._get_ddp_logging_data().get("comm_hook", "")
    if logged and not communication_hooks(wrapper):
        return f"the wrapper has the communication hook {logged}, which is not known in Python"
    return None


def renew_reducer(wrapper: Any) -> None:
    """Give a DistributedDataParallel wrapper a new reducer, on the current stream.

    A reducer holds the nodes that accumulate gradients, which run on the stream on which it was
    created, and cannot be used any more after an error in backward. torch makes new ones only for
    unpickled wrappers. All ranks have to do this together: the new reducers agree on their buckets
    in their second call.
    """
    hooks = list(communication_hooks(wrapper))
    # First free the old one: parameters keep their nodes as long as anything holds them.
    wrapper.reducer = wrapper.logger = None
    parameters, expect_sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, expect_sparse, names, wrapper.static_graph)
    wrapper._has_rebuilt_buckets = False
    if wrapper.static_graph:
        wrapper._static_graph_delay_allreduce_enqueued = False
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    communication_hooks(wrapper).clear()
    for hook, state in hooks:
        wrapper.register_comm_hook(state, hook)
    # After ten calls a reducer times every hundredth, by events that a capture cannot read.
    wrapper._set_ddp_runtime_logging_sample_rate(_NEVER)


def group_timeout(group: Any, device: torch.device) -> Any:
    """Return the time-out of a process group on a device; None if torch does not show it."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


# -- FSDP2 -----------------------------------------------------------------------------------------


class FsdpGroup(NamedTuple):
    """A group of parameters that `torch.distributed.fsdp.fully_shard` gathers together."""

    module: nn.Module
    """The module that was sharded; of several in one group the first."""
    parameters: list[nn.Parameter]
    """The shards, which the optimizer updates."""
    policy: Any
    """Its `MixedPrecisionPolicy`."""
    has_run: bool
    """Whether a forward pass has fixed the dtypes of the policy."""
    set_policy: Callable[[Any], None]
    """Replaces the policy, before the first forward pass."""


def fsdp_groups(model: nn.Module) -> list[FsdpGroup]:
    """Return the groups of a model that FSDP2 has sharded; none for other models.

    torch has no public way to read or change the mixed precision of a sharded model.
    """
    states = _fsdp_states(model)
    return [
        FsdpGroup(
            module,
            [parameter.sharded_param for parameter in _attribute(group, "fsdp_params")],
            _group_policy(group),
            _attribute(state, "_is_root") is not None,
            partial(_set_policy, state, group),
        )
        for module, state in states
        for group in _param_groups(state)
    ]


def _fsdp_states(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Return the states of a sharded model, each with its first module."""
    # Slow to import, and no module can be sharded before.
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415

    states = {
        id(state): (module, state)
        for module in reversed(list(model.modules()))
        if isinstance(module, FSDPModule)
        for state in [_attribute(module, "_get_fsdp_state")()]
    }
    return list(reversed(states.values()))


def fsdp_shards(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return the shards of the parameters that a sharded model holds gathered, by the ids of those.

    After a forward pass without a backward pass these are the parameters of the root, and of the
    modules with another `reshard_after_forward` than True, until the next backward pass.
    """
    return {
        id(gathered): parameter.sharded_param
        for _, state in _fsdp_states(model)
        for group in _param_groups(state)
        for parameter in group.fsdp_params
        for place in [_attribute(parameter, "_module_info")]
        for gathered in [getattr(place.module, place.param_name)]
        if gathered is not parameter.sharded_param
    }


def reshard(model: nn.Module) -> None:
    """Let a sharded model free the parameters that it holds gathered. All ranks do it together."""
    for module, _ in _fsdp_states(model):
        _attribute(module, "reshard")()


def set_sharded_data(parameter: torch.Tensor, data: torch.Tensor) -> None:
    """Set the data of a parameter that is a DTensor to a DTensor of any dtype.

    Setting `.data` alone changes what dtype the parameter has, and not its local tensor.
    """
    parameter.data = data
    for name in ("_local_tensor", "_spec"):
        setattr(parameter, name, _attribute(data, name))


def _param_groups(state: Any) -> list[Any]:
    """Return the parameter groups of a state; it has one at most before torch 2.12."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = _attribute(state, "_fsdp_param_group")
    return [] if group is None else [group]


def _group_policy(group: Any) -> Any:
    """Return the policy of a group, which its parameters share.

    Since torch 2.15 a parameter can have another one, by the policy's `param_dtype_override_fn`.
    """
    first, *others = [_attribute(parameter, "mp_policy") for parameter in group.fsdp_params]
    if any(policy != first for policy in others):
        raise UnsupportedError(
            "Parameters that FSDP2 gathers together have several dtypes: its policy has a"
            " param_dtype_override_fn. Leave mp_policy out of fully_shard(...), and shard modules"
            " that keep their dtype by themselves."
        )
    return first


def _set_policy(state: Any, group: Any, policy: Any) -> None:
    # The state casts inputs and outputs of forward, parameters choose the dtypes of collectives;
    # before torch 2.15 their group does.
    state._mp_policy = policy
    for owner in (group, *group.fsdp_params):
        if hasattr(owner, "mp_policy"):
            owner.mp_policy = policy


def fsdp_reduce_dtype(policy: Any, stored: torch.dtype) -> torch.dtype:
    """Return the dtype in which FSDP2 reduces gradients of shards that are stored in a dtype.

    A policy without `reduce_dtype` reduces in that of the shards since torch 2.15, and before in
    that of the parameters that it gathers.
    """
    dtype: torch.dtype | None = policy.reduce_dtype
    if dtype is None and torch.__version__ < "2.15":
        dtype = policy.param_dtype
    return dtype or stored


def _attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        _raise_unsupported("support for FSDP2", f"{type(owner).__name__}.{name}")
    return getattr(owner, name)


_EMPTY = object()
"""Stands for what is emptied, and not replaced."""

_BEFORE_A_PASS: dict[str, dict[str, Any]] = {
    "state": {"_modules_to_run_forward": _EMPTY},
    "context": {
        "iter_forward_root": None,
        "post_backward_final_callback_queued": False,
        "manual_backward_finalization_active": None,
        "gradient_reduction_pending": False,
    },
    "communication": {
        "all_gather_state": None,
        "reduce_scatter_state": None,
        "active_gradient_reduction": None,
        "post_forward_order": _EMPTY,
        "reduce_scatter_states": _EMPTY,
        "_last_post_reduce_events": _EMPTY,
    },
    "group": {
        "_all_gather_result": None,
        "_post_reduce_event": None,
        "_all_reduce_state": None,
        "_reshard_after_forward_event": None,
        "_partial_reduce_output": None,
        "_partial_reduce_output_layout": _EMPTY,
        "_post_backward_pending": False,
        "_post_forward_indices": _EMPTY,
    },
}
"""What a pass changes in the objects of FSDP2, of all versions of torch, and what it was before."""


def fsdp_reset_refusal(model: nn.Module) -> str | None:
    """Return why `reset_fsdp` cannot be called for a sharded model, or None if it can."""
    for _, state in _fsdp_states(model):
        context, groups = _attribute(state, "_state_ctx"), _param_groups(state)
        owners = [(state, "_training_state"), (state, "_comm_ctx"), (context, "iter_forward_root")]
        owners += [(group, name) for group in groups for name in ("_training_state", "_to_sharded")]
        for owner, name in owners:
            if not hasattr(owner, name):
                return f"torch {torch.__version__} has no {type(owner).__name__}.{name}"
    return None


def reset_fsdp(model: nn.Module) -> None:
    """Let a sharded model forget a forward or backward pass that an error has interrupted.

    Whole parameters that were gathered in a failed capture hold no values, and events that were
    recorded in it cannot be waited for. Gradients of the pass are lost, those of shards are kept.
    """
    for _, state in _fsdp_states(model):
        idle = type(state._training_state).IDLE
        state._training_state = idle
        _set_back(state, "state")
        _set_back(state._state_ctx, "context")
        _set_back(state._comm_ctx, "communication")
        for group in _param_groups(state):
            group._training_state = idle
            _set_back(group, "group")
            for parameter in group.fsdp_params:
                # Since torch 2.15 this is the gradient of the whole parameter, and read-only.
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None
                if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                    whole.grad = None
            group._to_sharded()


def _set_back(owner: Any, kind: str) -> None:
    for name, before in _BEFORE_A_PASS[kind].items():
        if before is not _EMPTY and hasattr(owner, name):
            setattr(owner, name, before)
        elif before is _EMPTY and hasattr(owner, name):
            getattr(owner, name).clear()


def shards(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the local tensors of DTensors; plain tensors as they are.

    Without the checks of `to_local`, which take microseconds for each.
    """
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def torch_scaler_flags(scaler: Any) -> list[torch.Tensor]:
    """Return the `found_inf` flags of torch's scaler since its last update."""
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    return [flag for state in states for flag in state["found_inf_per_device"].values()]


def torch_scaler_scale(scaler: Any) -> torch.Tensor | float:
    """Return the scale of torch's scaler, on its device; a number before the first loss."""
    scale: torch.Tensor | None = getattr(scaler, "_scale", None)
    # Reading a number on the host is no synchronization before there is a tensor.
    return float(scaler.get_scale()) if scale is None else scale
