"""Run training graphs on ONNX Runtime. Imports `graph`.

From the bottom up: `device` (where, by which provider, with which options), `session` (a graph that the runtime has
taken), `tensors` (what users feed), `signature` (what a graph accepts), `state_buffers`, `bound_session` (a step from
one set of buffers to the other), `step_runner` (checks, and a session by shapes), `several_steps` and `evaluation`, and
the facade, `executor`. The `layer_` files are the parts of `graphopt.ForwardBackward`.
"""
