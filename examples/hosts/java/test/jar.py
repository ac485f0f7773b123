"""Take ONNX Runtime's package for Java out of a jar of several packages: python jar.py OF_SEVERAL.jar

It is com.microsoft.onnxruntime:onnxruntime of Maven, which tests/test_hosts_java.py reads beside this file.
"""

import sys
import zipfile
from pathlib import Path

with zipfile.ZipFile(sys.argv[1]) as several, zipfile.ZipFile(Path(__file__).with_name("onnxruntime.jar"), "w") as jar:
    for name in several.namelist():
        if name.startswith("ai/onnxruntime/") and name.endswith((".class", "libonnxruntime4j_jni.so")):
            jar.writestr(name, several.read(name))
