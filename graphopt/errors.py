"""Define the error that graphopt raises for everything that a user can correct."""

import contextlib
import copyreg
import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

LONGEST = 2_000  # characters of a message
LONGEST_WORD = 200  # characters of a word, or of a text in quotes
LONG = re.compile(rf"(?<=')[^']{{{LONGEST_WORD},}}(?=')|[^\s']{{{LONGEST_WORD},}}")
CUT = "..."
_OWN = ("graphopt", "passes")
_FRAMEWORKS = (
    "torch",
    "keras",
    "tensorflow",
    "jax",
    "flax",
    "sklearn",
    "onnxruntime",
    "onnx",
    "onnx_ir",
    "pandas",
)
MOST_COMPARED = 1_000  # names among which `nearest` looks
LONGEST_COMPARED = 60  # characters of a name that `nearest` looks for

# Words of other libraries, and graphopt's for the same thing: each line has one meaning, without case and underscores.
MEANINGS = """
accumulate accumulation accumulategradbatches gradientaccumulationsteps
accuracy acc valacc valaccuracy score
batchsize bs batch minibatch minibatchsize traindataloaderbatchsize perdevicetrainbatchsize
beta1 b1 betas
beta2 b2
binarycrossentropy bce bceloss bcewithlogits bcewithlogitsloss binarycrossentropywithlogits logloss
callbacks callback hooks hook
checkpoint checkpoints checkpointdir checkpointpath ckpt ckptpath savedir outputdir modelcheckpoint
classweights classweight
clip gradclip gradientclip gradientclipval clipnorm clipvalue clipgradnorm
cnn convnet conv convolutional resnet
clipglobalnorm clipbyglobalnorm clipgradnorm
cosine cosineannealing cosineannealinglr cosinedecay
crossentropy crossentropyloss categoricalcrossentropy sparsecategoricalcrossentropy ce nll nllloss softmaxloss
device accelerator gpu gpus usecuda
epochs epoch nepochs numepochs maxepochs numtrainepochs nepoch maxiter niter iterations
epsilon eps
evaluate test score validate eval
csv readcsv tsv excel xlsx
cuda gpu
data dataset datasets traindata datafile
delimiter sep separator
executor session inferencesession
every stepsize period
exponential exponentiallr exponentialdecay
f1 f1score
factor gamma decayrate
fit train training learn
float16 fp16 half amp autocast mixedprecision
bfloat16 bf16
folder output out outdir outputdir logdir rundir defaultrootdir
globalnorm norm clipnorm
freeze frozen trainable
grow keep keepclasses keepold extend expand
huber smoothl1 smoothl1loss huberloss
kldivergence kl kldiv kldivloss
learningrateinit learningrate lr eta baselr initiallr
limit maxtime timeout
linear dense logisticregression linearregression
loss criterion lossfn lossfunction objective
meanabsoluteerror mae l1loss valmae
meansquarederror mse mseloss l2loss valmse
metrics metric scoring
model arch architecture network net
native kernels
none null no off false float32 fp32
mlp net network feedforward
monitor metric
optimizer optim optimiser solver updater
parameters params weights trainable
poisson poissonnllloss
path file filename filepath
predict infer inference forward call
precision amp fp16 bf16 half
prefetch numworkers workers
quiet verbose silent verbosity
regularizer penalty regularization
restorebest restorebestweights
earlystopping patience earlystop restorebestweights
report summary
resume resumefromcheckpoint fromcheckpoint initialepoch warmstart continue
rocauc auc rocaucscore
standardize scale scaler standardscaler normalize normalization
strength alpha lambda penalty l2
target label y
schedule scheduler lrscheduler learningrateschedule lrschedule
seed randomstate randomseed rng manualseed
stepdecay steplr
steps tmax totalsteps maxsteps decaysteps numsteps
stepsperepoch limittrainbatches samplesperepoch batchesperepoch
threads nthreads numthreads njobs ncores intraopnumthreads
timelimit maxtime timer
transformer gpt languagemodel
transform augment augmentation augmenter preprocess
validation validationsplit validationdata validationfraction valdata valsplit valid val evalset testsize validset
validationevery validationfreq evalevery checkvaleverynepoch
validationloss valloss evalloss testloss
verbose progress progressbar verbosity enableprogressbar
weightdecay wd decay l2 l2penalty
"""


class GraphoptError(ValueError):
    """Report a mistake that you can correct, in one line: the thing, what was expected and found, what to do.

    Unprintable characters, for example in file names, are escaped. Long names and values are cut in the middle.

    >>> try:
    ...     graphopt.load("missing.onnx")
    ... except graphopt.GraphoptError as error:
    ...     print("missing.onnx" in str(error))
    True
    """

    def __init__(self, message: str) -> None:
        super().__init__(escaped(shortened(message)))

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the message as it is, whatever the class of the error makes it from."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BlockingOperator:
    """Describe an operator without a gradient: its nodes, the parameters that they block, and the reason if known."""

    domain: str
    op_type: str
    nodes: tuple[str, ...]
    blocks: tuple[str, ...]
    reason: str | None = None

    @property
    def operator(self) -> str:
        """Return the operator's name with its domain."""
        return f"{self.domain}::{self.op_type}" if self.domain else self.op_type

    def __str__(self) -> str:
        blocks = f"; blocks {_quoted(self.blocks)}" if self.blocks else ""
        reason = f"; {self.reason}" if self.reason else ""
        return f"{self.operator} (nodes {_quoted(self.nodes)}{blocks}{reason})"


class NoGradient(GraphoptError):
    """Report operators between the parameters and the objective that have no gradient."""

    def __init__(self, operators: Sequence[BlockingOperator], remedy: str = "register rules") -> None:
        self.operators = operators
        super().__init__(
            f"no gradient rule for {'; '.join(map(str, operators))}: {remedy} or freeze the parameters that they block"
        )


def escaped(text: str, keep: str = "") -> str:
    """Return text in which line breaks and what would control a terminal or reorder its line are escapes.

    Args:
        keep: characters that stay as they are.

    >>> escaped("a\nb\x1b[31m\u202e")
    'a\\nb\\x1b[31m\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def shortened(message: str) -> str:
    """Return a message in which each long word or quoted text, and then the whole, is cut in the middle.

    >>> len(shortened("unknown field '" + 10**5 * "a" + "': remove it"))
    227
    """
    if len(message) <= LONGEST_WORD:
        return message
    text = LONG.sub(lambda match: _cut(match[0], LONGEST_WORD), message)
    return _cut(text, LONGEST)


def _cut(text: str, most: int) -> str:
    """Return the start and the end of a text that is longer than `most` characters."""
    rest = most - len(CUT)
    return text if len(text) <= most else f"{text[: rest - rest // 2]}{CUT}{text[-(rest // 2) :]}"


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Put the name of a file or a place before the message of an error, in a `with` block."""
    try:
        yield
    except GraphoptError as error:
        raise GraphoptError(f"{place}: {error}") from error


def line(error: BaseException) -> str:
    """Return a library's error message as one line."""
    return " ".join(str(error).split())


def root(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def cause(error: BaseException) -> str:
    """Return the message of the first error in the chain of causes as one line."""
    return line(root(error))


def _plain(name: str) -> str:
    """Return the last part of a dotted name in small letters and digits."""
    return re.sub(r"[\W_]", "", name.rpartition(".")[2].lower())


def nearest(name: str, names: Iterable[object], cutoff: float = 0.65) -> str | None:
    """Return the one of `names` that is probably meant by an unknown `name`, or None.

    >>> nearest("learnin_rate", ["epochs", "learning_rate"]), nearest("lr", ["epochs", "learning_rate"])
    ('learning_rate', 'learning_rate')
    """
    sought = _plain(name)
    if not sought or len(name) > LONGEST_COMPARED:
        return None
    known = {_plain(text): text for text in islice(map(str, names), MOST_COMPARED)}
    if sought in known:
        return known[sought]
    for meaning in MEANINGS.splitlines():
        words = meaning.split()
        if sought in words:
            for word in words:
                if word in known:
                    return known[word]
    # A slip rarely changes the first letter and the length: "port" is no "report".
    alike = [x for x in known if x[:1] == sought[:1] or abs(len(x) - len(sought)) <= max(1, len(sought) // 3)]
    near = difflib.get_close_matches(sought, alike, n=1, cutoff=cutoff)
    if not near and len(sought) > 2:
        near = sorted((text for text in known if text.startswith(sought) or _ends(known[text], sought)), key=len)
    return known[near[0]] if near else None


def _ends(name: str, sought: str) -> bool:
    """Return whether the last words of a name are the ones that are sought, as in `learning_rate` and `rate`."""
    words = re.split(r"[\W_]+", name.rpartition(".")[2].lower())
    return any("".join(words[i:]) == sought for i in range(1, len(words)))


def unknown(kind: str, name: str, names: Iterable[object], elsewhere: Iterable[str] = ()) -> str:
    """Return an error message for an unknown `name` that tells the nearest of the known `names`, and lists them.

    `elsewhere` are other names that may be meant, such as paths of fields in other parts of a recipe.

    >>> unknown("option", "epoch", ["epochs", "seed"])
    "unknown option 'epoch', nearest: 'epochs'; known: epochs, seed"
    """
    known = sorted(map(str, names))
    meant = nearest(name, known) or nearest(name, elsewhere, cutoff=0.8)
    return f"unknown {kind} {name!r}{f', nearest: {meant!r}' if meant else ''}; known: {', '.join(known) or 'none'}"


def library_of(thing: object) -> str | None:
    """Return the package of an object's class, or of a base of its class, that is neither Python's nor the user's."""
    kind = thing if isinstance(thing, type) else type(thing)
    packages = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if packages[0] in _OWN:
        return None
    return next((name for name in packages if name in _FRAMEWORKS), None)


def kind_of(thing: object) -> str:
    """Return what an object is, in words.

    >>> kind_of(None), kind_of({}), kind_of(GraphoptError)
    ('None', 'a dict', 'the class GraphoptError')
    """
    if thing is None:
        return "None"
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    if isinstance(thing, str):
        return repr(thing)
    name, library = type(thing).__name__, library_of(thing)
    if library is not None:
        return f"{library}'s {name}"
    return f"{'an' if name[:1].lower() in 'aeiou' or name == 'ndarray' else 'a'} {name}"


def some(texts: Sequence[str], most: int = 3) -> str:
    """Return the first of several texts, and the number of the others."""
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
