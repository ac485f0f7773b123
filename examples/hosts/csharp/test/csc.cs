// A C# compiler: csc.dll SOURCE... /out:MADE.dll /reference:LIBRARY.dll, by Roslyn, against the runtime that runs it.
using Microsoft.CodeAnalysis;
using Microsoft.CodeAnalysis.CSharp;

var parsed = CSharpCommandLineParser.Default.Parse(args, Directory.GetCurrentDirectory(), null);
var known = ((string)AppContext.GetData("TRUSTED_PLATFORM_ASSEMBLIES")!).Split(':');
var library = Path.GetDirectoryName(typeof(object).Assembly.Location)!;
var references = known.Where(path => Path.GetDirectoryName(path) == library).Concat(parsed.MetadataReferences.Select(x => x.Reference));
var trees = parsed.SourceFiles.Select(x => CSharpSyntaxTree.ParseText(File.ReadAllText(x.Path), parsed.ParseOptions, x.Path));
var made = CSharpCompilation.Create(Path.GetFileNameWithoutExtension(parsed.OutputFileName), trees,
    references.Select(path => MetadataReference.CreateFromFile(path)), parsed.CompilationOptions);
using var file = File.Create(Path.Combine(parsed.OutputDirectory, parsed.OutputFileName!));
var done = made.Emit(file);
foreach (var told in done.Diagnostics.Concat(parsed.Errors)) if (told.Severity >= DiagnosticSeverity.Warning) Console.Error.WriteLine(told);
return done.Success && parsed.Errors.IsEmpty ? 0 : 1;
