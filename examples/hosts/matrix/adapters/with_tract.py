"""tract, in Rust."""

import onnx
import tract


def open_graph(path, feeds):
    graph = tract.onnx().load(str(path))
    inputs = [graph.input_name(i) for i in range(graph.input_count())]
    outputs = [y.name for y in onnx.load(path).graph.output]
    for i, name in enumerate(inputs):
        kind = {"float32": "f32", "int64": "i64"}[str(feeds[name].dtype)]
        graph.set_input_fact(i, ",".join([*map(str, feeds[name].shape), kind]))
    model = graph.into_model().into_runnable()
    return lambda fed: dict(
        zip(outputs, (y.to_numpy() for y in model.run([fed[name] for name in inputs])), strict=True)
    )
