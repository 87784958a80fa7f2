"""The private names of torch, Triton and Python that kernels and optimizers use.

Most of them only save time on the host. An import that fails stops `import fused_lwlr`, so a new torch is tested first.

kernels/triton/look.py and look.c. Without any of these, `kernels/look.py` serves, with a warning, and takes longer:

- `torch._C.__file__`: the library in which to look up torch's C functions.
- `aoti_torch_get_layout`, `_dtype`, `_device_type`, `_device_index`, `_data_ptr`, `_storage_offset`, `_numel`, `_dim`,
  `_sizes`, `_strides`: exported for models compiled ahead of time; describe a tensor without Python. There is no
  warning if one is missing, as `_layout` is in torch 2.8.
- `Tensor._cdata`: finds the at::Tensor, which these functions take, in the memory of a Python tensor (`THPVariable`).
- The numbers of c10::Layout, c10::ScalarType and c10::DeviceType: tell a strided from a sparse tensor, and complex
  dtypes. The self-test compares them.
- CPython's `PyGetSetDescrObject.d_getset`: calls the getter of `Tensor.grad` without a lookup.
- `triton.runtime.build.compile_module_from_src`: compiles look.c and keeps the result. An import that fails stops
  the Triton backend.

kernels/triton/known_norms.py:

- `Tensor._version`: says whether someone has written to a weight. Without it: Σw² would be read anew in every step.

fused_lwlr/optim:

- `torch._C._set_grad_enabled` (base.py): `torch.no_grad`, which takes five times as long.
- `torch._C._autograd._profiler_enabled`, `torch._C._dynamo.eval_frame.get_eval_frame_callback`,
  `Optimizer._optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, and of `torch.optim.optimizer`
  `_global_optimizer_pre_hooks`, `_global_optimizer_post_hooks` (hooks.py): say that no profiler, compiler or hook needs
  torch's own wrapper of `step()`. Without them: that wrapper in every step.
- `torch._compile._disable_dynamo` (hooks.py): `torch.compiler.disable`, which imports torch._dynamo at once.
- `torch._C._len_torch_dispatch_stack`, `torch.utils._python_dispatch._get_current_dispatch_mode_stack` and the names
  of two modes, `_CloneArgBeforeMutateMode` and `ProxyTorchDispatchMode` (validate.py): say that a mode must see every
  update, so that a step of Triton raises. Without them: wrong gradients and wrong traces, with no error.
- `Optimizer._optimizer_load_state_dict_pre_hooks`, `_optimizer_load_state_dict_post_hooks` (base.py): run the
  hooks that users registered. Without them: `Optimizer.load_state_dict`, which converts state to the dtype of its
  parameter.

Names without an underscore that torch and Triton do not document either: `Optimizer.profile_hook_step`,
`triton.knobs.runtime.interpret`, and `warmup`, `arg_names` and `compiled[grid]` of a kernel (kernels/triton/launch.py).
"""
