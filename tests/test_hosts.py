"""What `export_hosts` writes trains on a bare ONNX Runtime as graphopt's executor does, by the loop of `host.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
from builders import fed

import graphopt
import passes
from graphopt import models

STEPS = 12
