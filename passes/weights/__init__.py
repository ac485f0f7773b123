"""Decide what each floating-point initializer is from the user's options, the exporter's records and the graph."""

from __future__ import annotations

import warnings

import onnx_ir as ir

from graphopt.graph.origins import Evidence, Exported, Kind, LeftOut, Origin
from graphopt.graph.traversal import sort
from graphopt.graph.values import name_of
from passes.weights import detached, exported_program, records, torchscript
from passes.weights.initializers import literals_in, weights_in

FOLDED_BY_TF2ONNX = "const_fold_opt__"  # with a number: the names of constants that tf2onnx computes


def read_origins(model: ir.Model) -> dict[str, Origin]:
    """Reverse the exporter's changes to parameters where possible, and return the kinds of its initializers by name.

    PyTorch's exporters merge weights with equal initial values, fold functions of one parameter, such as exp(scale),
    fold gathers of its rows, and drop biases of zeros. Merged weights become separate initializers, the graph computes
    folded functions and gathers again, and dropped biases are restored. The model notes which parameters the file does
    not contain in any form.
    """
    if (exported := Exported.read(model)) is not None and (origins := records.origins(model, exported)):
        detached.stop_at_padding(model)
        sort(model.graph)
        return origins
    program = exported_program.ExportedProgram(model)
    if program.paths:
        detached.stop(program)
        detached.stop_at_padding(model)
        exported_program.restore_records(program)
        restored = exported_program.separate_layouts(program) | exported_program.separate_parameters(program)
        exported_program.keep_zeros(program)
        restored |= exported_program.invert(program)
        restored |= exported_program.restore_gathers(program) | exported_program.recompute(program)
        restored |= exported_program.restore_biases(program)
        sort(model.graph)
        if left_out := exported_program.parameters_left_out(program):
            LeftOut(tuple(left_out)).write(model)
        return exported_program.program_origins(program) | restored
    if exported_program.is_stripped(model):
        warnings.warn(
            "another tool removed the records of PyTorch's exporter about weights: rules decide what trains, weights "
            "that the exporter merged stay one, and gradients pass every detach(): compile the file that "
            "torch.onnx.export wrote, or check run=report",
            stacklevel=2,
        )
        module = torchscript.ExportedModule(model)
        buffers = [x for x in weights_in(model) if torchscript.is_buffer(name_of(x))]
        return {name_of(x): origin for x in buffers if (origin := torchscript.origin_of(x, module))}
    if model.producer_name == "pytorch":
        module = torchscript.ExportedModule(model)
        restored = torchscript.separate_merged(module)
        restored |= torchscript.restore_rows(module) | torchscript.keep_zeros(module)
        sort(model.graph)
        found = {name_of(x): torchscript.origin_of(x, module) for x in weights_in(model)}
        origins = {name: origin for name, origin in found.items() if origin is not None}
        literal = Origin(Kind.CONSTANT, "a literal of the exported program", Evidence.RECORD)
        return origins | dict.fromkeys(literals_in(model), literal) | restored
    if (model.producer_name or "").startswith("tf2onnx"):
        variables = [name for x in weights_in(model) if "ReadVariableOp" in (name := name_of(x))]
        origin = Origin(Kind.PARAMETER, "a variable of the exported program", Evidence.NAME, named=True)
        return dict.fromkeys(variables, origin)
    return {}
