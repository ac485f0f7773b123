"""Run training graphs on ONNX Runtime. Imports `graph`.

From the bottom up: `providers` (the kinds of devices), `device` (a device with its options), `tensors` (conversion of
fed tensors), `session` (a graph loaded into the runtime), `signature` (checks of fed tensors), `state_buffers`,
`bound_session` (a step from one set of buffers to the other), `forms` (kernels or another target), `runners` (checks, a
session for each shape, and several steps per call), and the facade, `executor`.
"""
