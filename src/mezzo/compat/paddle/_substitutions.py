"""What to use of torch for names of Paddle that are not here."""

from __future__ import annotations

from collections.abc import Mapping

SUBSTITUTIONS: Mapping[str, str] = {
    "device.cuda.Event": "torch.cuda.Event",
    "device.cuda.Stream": "torch.cuda.Stream",
    "device.cuda.current_stream": "torch.cuda.current_stream",
    "device.cuda.stream_guard": "torch.cuda.stream",
    "static.CompiledProgram": "the program itself: exe.run(program, use_program_cache=True)",
    "static.append_backward": "optimizer.minimize(loss)",
    "static.gradients": "optimizer.minimize(loss), or torch.autograd.grad in eager mode",
    "static.load_inference_model": "torch.export.load",
    "static.nn": "the layers of paddle.nn, called with static.data",
    "static.save_inference_model": "torch.export.save of the network",
    "static.amp.bf16": "static.amp.decorate(optimizer, dtype='bfloat16')",
    "static.amp.cast_model_to_fp16": "static.amp.decorate(optimizer, use_pure_fp16=True)",
    "static.amp.cast_parameters_to_fp16": "amp_init of the decorated optimizer",
    "nn.initializer": "torch.nn.init",
    "vision.transforms": "torchvision.transforms",
    "vision.datasets": "torchvision.datasets",
    "vision.models": "torchvision.models",
    "regularizer.L1Decay": "regularizer.L2Decay, or add the absolute weights to the loss",
    "callbacks.EarlyStopping": "a callbacks.Callback that sets self.model.stop_training",
    "callbacks.ModelCheckpoint": "model.fit(save_dir=..., save_freq=...)",
    "distributed.fleet": "paddle.DataParallel, or torch.distributed",
    "distributed.spawn": "torchrun, which starts the processes",
    "distributed.launch": "torchrun",
}
"""Name in Paddle → what to use of torch."""
