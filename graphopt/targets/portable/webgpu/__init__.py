"""Write operators that ONNX Runtime's WebGPU provider lacks or computes wrongly as others.

Versions are those of the packages onnxruntime-webgpu 1.27 and onnxruntime-ep-webgpu 0.4. The provider computes in
float32, with the integers of 32 bits. NaN is not kept everywhere: its Relu, Sigmoid, Exp, Softplus and Clip lose it
(tests/faults.py: webgpu-operators).
"""

from graphopt.targets.portable.form import Form
from graphopt.targets.portable.normalizations import centered
from graphopt.targets.portable.webgpu import arithmetic, convolutions, integers, layout, pools, products

WEBGPU: dict[str, Form] = {
    **arithmetic.FORMS,
    **convolutions.FORMS,
    **layout.FORMS,
    "InstanceNormalization": centered(2),
    "LayerNormalization": centered(-1),
    **pools.FORMS,
    **products.FORMS,
    **integers.FORMS,  # the last: they call forms of other types
}
