"""Run training graphs on ONNX Runtime. Imports `graph`.

From the bottom up: `device` (device, provider and options), `session` (a graph loaded into the runtime), `tensors`
(conversion of fed tensors), `signature` (checks of fed tensors), `state_buffers`, `bound_session` (a step from one
set of buffers to the other), `step_runner` (checks, and a session for each shape), `several_steps` and `evaluation`,
and the facade, `executor`. The `layer_` files are parts of `graphopt.ForwardBackward`.
"""
