"""Take ONNX Runtime's package for Java out of a jar of several packages: python jar.py OF_SEVERAL.jar MADE.jar

It is com.microsoft.onnxruntime:onnxruntime of Maven, which tests/test_hosts_java.py reads beside this file.
"""

import hashlib
import os
import sys
import zipfile
from pathlib import Path

SHA256 = "183bf5b53c82441b249d475f66f73aaa3e7dedd8892dece747e3680a1fda34f3"  # of the jar in pyserini 1.6.0

source, made = map(Path, sys.argv[1:])
part = made.with_suffix(".part")
if (found := hashlib.sha256(source.read_bytes()).hexdigest()) != SHA256:
    sys.exit(f"{source}: expected the SHA-256 {SHA256}, found {found}")
with zipfile.ZipFile(source) as several, zipfile.ZipFile(part, "w") as jar:
    for name in several.namelist():
        if name.startswith("ai/onnxruntime/") and name.endswith((".class", "libonnxruntime4j_jni.so")):
            jar.writestr(name, several.read(name))
os.replace(part, made)
