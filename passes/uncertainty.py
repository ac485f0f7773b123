"""Say how sure a prediction is, inside the file: by the weights that would fit as well, by dropout, by several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.classified import activation_of, classification_of
from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import constant_number, constant_of, dims_of, given, is_floating, like, name_of
from graphopt.intervals import within
from passes.calibration import Learning, Scores, matching
from passes.differentiate import floating_output
from passes.gradients.rules.control_flow import scan_over
from passes.gradients.walk import zeros
from passes.losses.frozen import put_in
from passes.training_mode import uniform

__all__ = ["Ensemble", "LastLayerLaplace", "MonteCarloDropout"]
