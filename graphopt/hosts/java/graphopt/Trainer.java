package graphopt;

import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxTensorLike;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import graphopt.GraphoptException.NotFinite;
import graphopt.GraphoptException.Unproven;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.Predicate;

/** Trains from a folder of graphopt.export_hosts on ONNX Runtime. One thread at a time may call it. */
public final class Trainer implements AutoCloseable {
    private final OrtEnvironment environment = OrtEnvironment.getEnvironment();
    private final File folder;
    private final Provider provider;
    private final Map<String, ?> host;
    private final List<Value> feeds, state, hyperparameters, reports;
    private final Map<String, OrtSession> sessions = new LinkedHashMap<>();
    private final Map<String, OnnxTensor> current = new LinkedHashMap<>(); // state and hyperparameters
    private final Map<String, String> proofs = new LinkedHashMap<>();
    private final List<String> told = new ArrayList<>();
    private final Bytes file; // of the state
    private final File cache;
    private final String device;
    private final Map<String, String> hashes = new LinkedHashMap<>(); // of files, for the memory of the proof
    private OrtSession.Result last; // owns the state after a step
    private boolean isClosed;

    /**
     * Opens a folder on the first of some providers whose step agrees with the proof.
     *
     * @param cache a folder that this program alone writes to, which remembers the proof; null compares each time
     * @param device what else decides what is computed, beside files, processor, the runtime's version and the provider's
     *     name: android.os.Build.FINGERPRINT, or options of a provider
     * @param providers in their order; none is the CPU
     */
    public static Trainer open(File folder, File cache, String device, Provider... providers) throws GraphoptException, OrtException, IOException {
        List<Provider> order = providers.length > 0 ? Arrays.asList(providers) : Collections.singletonList(Provider.CPU);
        List<String> told = new ArrayList<>();
        for (int i = 0; ; i++) {
            boolean isLast = i + 1 == order.size();
            Trainer trainer = new Trainer(folder, cache, device, order.get(i));
            try {
                trainer.graph("train");
                trainer.graph("evaluate");
                if (trainer.fileOf("predict") != null) trainer.graph("predict");
                trainer.told.addAll(told);
                return trainer;
            } catch (Unproven | OrtException error) {
                trainer.close();
                if (isLast) throw error;
                told.add(order.get(i).name + ": " + String.valueOf(error.getMessage()).replaceAll("\\p{Cntrl}", " ") + ": " + order.get(i + 1).name + " computes it");
            } catch (Throwable error) { // also an OutOfMemoryError: sessions hold memory that is not Java's
                trainer.close();
                throw error;
            }
        }
    }

    private Trainer(File folder, File cache, String device, Provider provider) throws GraphoptException, OrtException, IOException {
        this.folder = folder;
        this.cache = cache;
        this.device = device;
        this.provider = provider;
        host = object(Json.read(new String(read("host.json"), StandardCharsets.UTF_8), "host.json"), "an object");
        if (!"graphopt.host".equals(host.get("format")) || !Long.valueOf(1).equals(host.get("version")))
            throw new GraphoptException("host.json: expected graphopt.host version 1, found another: write it with export_hosts");
        String first = String.valueOf(object(host.get("runtime"), "a runtime").get("onnxruntime")), found = environment.getVersion();
        if (first.matches("1\\.\\d{1,6}") && found.matches("1\\.\\d{1,6}(\\..*)?") && minor(found) < minor(first))
            throw new GraphoptException("ONNX Runtime: expected " + first + " or later, whose kernels are right, found " + found);
        feeds = values("feeds");
        state = values("state");
        hyperparameters = values("hyperparameters");
        reports = values("reports");
        file = new Bytes(read("state.safetensors"), "state.safetensors");
        for (Value x : state) if (x.next == null) throw new GraphoptException("host.json: state " + x.name + ": expected what is next, found none");
        compared("train");
        current.putAll(initial(x -> true));
    }

    /** The state of the folder and the defaults of hyperparameters that are asked for by name. */
    private Map<String, OnnxTensor> initial(Predicate<String> isRead) throws GraphoptException, OrtException {
        Map<String, OnnxTensor> made = stateOf(file, "state.safetensors", isRead);
        try {
            for (Value x : hyperparameters) if (isRead.test(x.name) && x.initial instanceof Number) made.put(x.name, hyperparameter(x, ((Number) x.initial).doubleValue()));
        } catch (Throwable error) {
            closeAll(made.values());
            throw error;
        }
        return made;
    }

    private OnnxTensor hyperparameter(Value x, double number) throws GraphoptException, OrtException {
        boolean isRate = x.name.endsWith("learning_rate");
        double held = "float32".equals(x.kind) ? (float) number : number;
        if (Double.isNaN(held) || Double.isInfinite(held) || (isRate && number < 0))
            throw new GraphoptException("hyperparameter " + x.name + ": expected a finite number" + (isRate ? ", 0 or more" : "") + ", found " + number);
        return x.tensor(environment, new double[] {number}, new LinkedHashMap<>());
    }

    static int minor(String version) {
        return Integer.parseInt(version.split("\\.")[1]);
    }

    private byte[] read(String name) throws IOException, GraphoptException {
        File path = new File(folder, name);
        if (!path.isFile()) throw new GraphoptException(path + ": expected a file, found none: write it with export_hosts");
        return Bytes.read(path);
    }

    @SuppressWarnings("unchecked")
    private static Map<String, ?> object(Object x, String what) throws GraphoptException {
        if (x instanceof Map) return (Map<String, ?>) x;
        throw new GraphoptException("host.json: expected " + what + ", found none: write it with export_hosts again");
    }

    private List<Value> values(String list) throws GraphoptException {
        List<Value> values = new ArrayList<>();
        if (!(host.get(list) instanceof List)) throw new GraphoptException("host.json: expected " + list + ", found none: write it with export_hosts again");
        for (Object entry : (List<?>) host.get(list)) values.add(new Value(entry));
        return values;
    }

    private List<String> names(String graph, String list) throws GraphoptException {
        List<String> names = new ArrayList<>();
        Object found = object(object(host.get("graphs"), "graphs").get(graph), "the graph " + graph).get(list);
        if (found instanceof List) for (Object name : (List<?>) found) names.add(String.valueOf(name));
        return names;
    }

    private String fileOf(String key) throws GraphoptException {
        Object name = object(host.get("files"), "files").get(key);
        if (!(name instanceof String)) return null;
        if (((String) name).matches("[A-Za-z0-9_]+\\.[a-z_]+")) return (String) name;
        throw new GraphoptException("host.json: files: " + key + ": expected the name of a file, found " + name);
    }

    OrtSession openGraph(String name, byte[] more) throws OrtException, IOException, GraphoptException {
        String graph = fileOf(name);
        if (graph == null || !new File(folder, graph).isFile())
            throw new GraphoptException(folder + ": expected the graph " + name + ", found none: write it with export_hosts");
        return provider.open(environment, folder, graph, more);
    }

    /** Opens a graph once, and compares it with the proof. */
    private OrtSession graph(String name) throws GraphoptException, OrtException, IOException {
        if (isClosed) throw new GraphoptException("trainer: expected an open one, found one that is closed: open the folder again");
        if (sessions.containsKey(name)) return sessions.get(name);
        OrtSession session = openGraph(name, new byte[0]);
        try {
            proofs.put(name, prove(name, session));
        } catch (Throwable error) {
            session.close();
            throw error;
        }
        sessions.put(name, session);
        return session;
    }

    private List<String> compared(String graph) throws GraphoptException {
        List<String> outputs = new ArrayList<>();
        if (graph.equals("train")) for (Value x : state) outputs.add(x.next);
        outputs.addAll(names(graph, "reports"));
        return outputs;
    }

    /** A hash of all that decides what a graph computes; null if a file cannot be read. */
    private String fingerprint(String... files) {
        StringBuilder facts = new StringBuilder();
        for (String fact : new String[] {environment.getVersion(), provider.name, device, System.getProperty("os.arch"), System.getProperty("os.version"), Proof.processor()})
            facts.append(fact).append('\n');
        try {
            for (String name : files) {
                if (name == null) continue;
                if (!hashes.containsKey(name)) hashes.put(name, Proof.hash(Files.newInputStream(new File(folder, name).toPath())));
                facts.append(name).append(' ').append(hashes.get(name)).append('\n');
            }
            return Proof.hash(facts.toString());
        } catch (IOException error) {
            return null;
        }
    }

    private String prove(String name, OrtSession session) throws GraphoptException, OrtException, IOException {
        String path = fileOf("proof");
        if (path == null) return "not proven: the folder has no proof";
        String graph = fileOf(name), found;
        File note = null;
        Map<String, OnnxTensor> given = new LinkedHashMap<>();
        try {
            String fingerprint = cache == null ? null : fingerprint("host.json", "state.safetensors", graph, path, fileOf("weights"));
            if (fingerprint != null) {
                note = new File(cache, "proof-" + name + "-" + fingerprint.substring(0, 2)); // 256 of each graph at most
                if (isNoted(note, fingerprint)) return "proven before";
            }
            Bytes proof = new Bytes(read(path), path);
            given.putAll(initial(session.getInputNames()::contains)); // a graph may be opened after steps
            for (Value x : feeds) {
                long[] dims = Proof.shape(proof, x.name);
                given.put(x.name, x.tensor(environment, Proof.feed(proof, x, dims), dims));
                x.tensor(environment, given.get(x.name), new LinkedHashMap<>()); // which refuses labels
            }
            Map<String, OnnxTensor> start = new LinkedHashMap<>();
            if (name.equals("train")) for (Value x : state) start.put(x.next, given.get(x.name));
            List<String> outputs = compared(name);
            try (OrtSession.Result result = run(session, name, given, outputs)) {
                Object[] differs = Proof.first(proof, "graph." + name, outputs, result, start);
                found = differs == null ? null : (String) differs[1];
            }
            if (found == null) {
                if (note != null) write(note, fingerprint);
                return "proven";
            }
            if (name.equals("train") && fileOf("debug") != null) {
                Map<String, OnnxTensor> read = new LinkedHashMap<>(given);
                read.keySet().retainAll(session.getInputNames());
                found += Proof.firstNode(this, new File(folder, fileOf("debug")), read);
            }
        } catch (GraphoptException | IOException | RuntimeException error) {
            return "not proven: " + error.getMessage();
        } finally {
            for (OnnxTensor tensor : given.values()) tensor.close();
        }
        throw new Unproven("ONNX Runtime " + environment.getVersion() + ": " + graph + ": output " + found);
    }

    private static boolean isNoted(File note, String fingerprint) {
        try {
            return note.isFile() && note.length() == fingerprint.length() && new String(Bytes.read(note), StandardCharsets.UTF_8).equals(fingerprint);
        } catch (IOException | GraphoptException error) {
            return false;
        }
    }

    private static void write(File note, String fingerprint) {
        try {
            if (note.getParentFile().isDirectory() || note.getParentFile().mkdirs()) Bytes.write(note, fingerprint.getBytes(StandardCharsets.UTF_8));
        } catch (IOException error) { // a disk that is full or read-only: the next opening compares again
        }
    }

    /** Runs a graph; of the given tensors, it takes those that are inputs of the graph. */
    private OrtSession.Result run(OrtSession session, String graph, Map<String, OnnxTensor> given, Iterable<String> outputs)
        throws OrtException, GraphoptException {
        Map<String, OnnxTensor> read = new LinkedHashMap<>();
        for (String name : session.getInputNames()) {
            if (!given.containsKey(name)) throw new GraphoptException(graph + ": expected " + name + ", found none: " + (isHyperparameter(name) ? "set it" : "feed it"));
            read.put(name, given.get(name));
        }
        Set<String> asked = new java.util.LinkedHashSet<>();
        for (String name : outputs) {
            if (!session.getOutputNames().contains(name))
                throw new GraphoptException(graph + ": expected an output " + name + ", found none: write it with export_hosts again");
            asked.add(name);
        }
        return session.run(read, asked);
    }

    private boolean isHyperparameter(String name) {
        for (Value x : hyperparameters) if (x.name.equals(name)) return true;
        return false;
    }

    /** What the proof says of each graph that is open: `proven`, `proven before`, or `not proven: ` and why. */
    public Map<String, String> proofs() {
        return Collections.unmodifiableMap(proofs);
    }

    /** A line for each provider that computes other numbers than the proof has, or refuses a graph. */
    public List<String> told() {
        return Collections.unmodifiableList(told);
    }

    public String provider() {
        return provider.name;
    }

    /** What each batch has: the names of feeds. */
    public List<String> feeds() {
        List<String> names = new ArrayList<>();
        for (Value x : feeds) names.add(x.name);
        return names;
    }

    private Value feed(String name) throws GraphoptException {
        for (Value x : feeds) if (x.name.equals(name)) return x;
        throw new GraphoptException("feed " + name + ": expected one of " + feeds() + ", found another");
    }

    /** The sizes of a feed; -1 where one is open. */
    public long[] shape(String feed) throws GraphoptException {
        List<?> shape = feed(feed).shape == null ? Collections.emptyList() : feed(feed).shape;
        long[] sizes = new long[shape.size()];
        for (int i = 0; i < sizes.length; i++) sizes[i] = shape.get(i) instanceof Long ? (Long) shape.get(i) : -1;
        return sizes;
    }

    /** The largest label of a feed; infinity for numbers. */
    public double most(String feed) throws GraphoptException {
        return feed(feed).high;
    }

    /** Sets a hyperparameter, such as `learning_rate`. */
    public void set(String name, double number) throws GraphoptException, OrtException {
        for (Value x : hyperparameters) {
            if (!x.name.equals(name)) continue;
            OnnxTensor old = current.put(name, hyperparameter(x, number));
            if (old != null) old.close();
            return;
        }
        throw new GraphoptException("hyperparameter " + name + ": expected one of host.json, found none of this name");
    }

    /** Does a step, and returns its reports. Feeds are arrays of float, double, int or long, or OnnxTensor. */
    public Map<String, double[]> step(Map<String, ?> batch) throws GraphoptException, OrtException, IOException {
        OrtSession session = graph("train");
        String check = host.get("check") instanceof String ? (String) host.get("check") : "loss";
        List<String> outputs = compared("train");
        if (!outputs.contains(check)) outputs.add(check);
        OrtSession.Result found = fed("train", session, batch, outputs);
        Map<String, double[]> told = new LinkedHashMap<>();
        Map<String, OnnxTensor> next = new LinkedHashMap<>();
        try {
            double[] sum = numbers(found, check);
            if (sum.length != 1) throw new GraphoptException("train.onnx: output " + check + ": expected one number, found " + sum.length + ": write it with export_hosts again");
            if (Double.isNaN(sum[0]) || Double.isInfinite(sum[0]))
                throw new NotFinite("step: expected a finite loss and state, found " + sum[0] + ": the state is as before; look at the batch");
            for (String name : names("train", "reports")) told.put(name, numbers(found, name));
            for (Value x : state) next.put(x.name, (OnnxTensor) found.get(x.next).get());
        } catch (Throwable error) {
            found.close();
            throw error;
        }
        for (Map.Entry<String, OnnxTensor> x : next.entrySet()) put(x.getKey(), x.getValue());
        if (last != null) last.close();
        last = found;
        return told;
    }

    /** Evaluates a batch: the loss and other reports of the inference form. */
    public Map<String, double[]> evaluate(Map<String, ?> batch) throws GraphoptException, OrtException, IOException {
        return inference("evaluate", batch);
    }

    /** Predicts from a batch without targets. */
    public Map<String, double[]> predict(Map<String, ?> batch) throws GraphoptException, OrtException, IOException {
        return inference("predict", batch);
    }

    private Map<String, double[]> inference(String graph, Map<String, ?> batch) throws GraphoptException, OrtException, IOException {
        Map<String, double[]> told = new LinkedHashMap<>();
        OrtSession session = graph(graph);
        try (OrtSession.Result found = fed(graph, session, batch, names(graph, "reports"))) {
            for (String name : names(graph, "reports")) told.put(name, numbers(found, name));
        }
        return told;
    }

    private OrtSession.Result fed(String graph, OrtSession session, Map<String, ?> batch, List<String> outputs) throws OrtException, GraphoptException {
        Map<String, OnnxTensor> given = new LinkedHashMap<>(current);
        List<OnnxTensor> own = new ArrayList<>();
        Map<String, Long> sizes = new LinkedHashMap<>();
        try {
            for (Value x : feeds) {
                Object numbers = batch.get(x.name);
                if (numbers == null) continue;
                OnnxTensor tensor = x.tensor(environment, numbers, sizes);
                if (tensor != numbers) own.add(tensor);
                given.put(x.name, tensor);
            }
            for (String name : batch.keySet()) feed(name);
            return run(session, graph, given, outputs);
        } finally {
            for (OnnxTensor tensor : own) tensor.close();
        }
    }

    private static double[] numbers(OrtSession.Result found, String name) throws GraphoptException {
        OnnxTensor tensor = (OnnxTensor) found.get(name).orElseThrow(() -> new GraphoptException("expected an output " + name + ", found none"));
        ByteBuffer bytes = Numbers.of(tensor);
        double[] numbers = new double[bytes.remaining() / tensor.getInfo().type.size];
        for (int i = 0; i < numbers.length; i++) numbers[i] = Numbers.at(bytes, tensor.getInfo().type, i);
        return numbers;
    }

    /** Puts a state in the place of an old one, which `last` owns, or nobody. */
    private void put(String name, OnnxTensor tensor) {
        OnnxTensor old = current.put(name, tensor);
        if (old != null && last == null) old.close();
    }

    /** The state in a file, as tensors. */
    private Map<String, OnnxTensor> stateOf(Bytes from, String path, Predicate<String> isRead) throws GraphoptException, OrtException {
        Map<String, OnnxTensor> made = new LinkedHashMap<>();
        Set<Object> unknown = from.names();
        for (Value x : state) unknown.remove(x.name);
        for (Object name : unknown)
            throw new GraphoptException(path + ": state " + name + ": expected none of this name, found one: take a checkpoint of this training graph");
        try {
            for (Value x : state) {
                long[] dims = x.sizes();
                int expected = x.type.size;
                for (long size : dims) expected *= (int) size;
                String own = x.stored() + " " + x.shape, found = from.property(x.name, "dtype") + " " + from.property(x.name, "shape");
                if (!own.equals(found))
                    throw new GraphoptException(path + ": state " + x.name + ": expected " + own + ", found " + found + ": take a checkpoint of this training graph");
                ByteBuffer numbers = from.numbers(x.name);
                if (numbers.remaining() != expected)
                    throw new GraphoptException(path + ": state " + x.name + ": expected " + expected + " bytes, found " + numbers.remaining()
                        + ": take a checkpoint of this training graph");
                if (isRead.test(x.name)) made.put(x.name, x.tensor(environment, numbers, dims));
            }
        } catch (Throwable error) {
            closeAll(made.values());
            throw error;
        }
        return made;
    }

    /** Goes on from a checkpoint: of this class, of another host, or of Executor.save(path, checksum=False). */
    public void load(File path) throws GraphoptException, OrtException, IOException {
        if (!path.isFile()) throw new GraphoptException(path + ": expected a checkpoint, found none");
        Map<String, OnnxTensor> made = stateOf(new Bytes(Bytes.read(path), path.getPath()), path.getPath(), x -> true);
        for (Map.Entry<String, OnnxTensor> x : made.entrySet()) put(x.getKey(), x.getValue());
        if (last != null) last.close();
        last = null;
    }

    /** Writes a checkpoint: the file of the state with other numbers. */
    public void save(File path) throws GraphoptException, IOException {
        byte[] content = file.content.clone();
        Bytes copy = new Bytes(content, path.getPath());
        for (Value x : state) copy.numbers(x.name).put(Numbers.of(current.get(x.name)));
        Bytes.write(path, content);
    }

    /** Writes the trained adapter to a folder that exists: form `peft` or `onnxruntime`. */
    public void adapter(String form, File to) throws GraphoptException, OrtException, IOException {
        Object forms = host.get("adapters"), found = forms instanceof Map ? ((Map<?, ?>) forms).get(form) : null;
        if (!(found instanceof Map))
            throw new GraphoptException("adapter: expected the form " + form + " in host.json, found none: graphopt.save_adapter in Python writes it, or says why");
        Map<String, OnnxTensor> known = new LinkedHashMap<>(current);
        OrtSession session = fileOf("adapter") == null ? null : graph("adapter");
        try (OrtSession.Result computed = session == null ? null : run(session, "adapter", current, session.getOutputNames())) {
            if (computed != null) for (Map.Entry<String, ai.onnxruntime.OnnxValue> x : computed) known.put(x.getKey(), (OnnxTensor) x.getValue());
            Map<String, byte[]> files = new LinkedHashMap<>();
            for (Map.Entry<?, ?> each : ((Map<?, ?>) found).entrySet()) {
                String name = String.valueOf(each.getKey());
                if (!Arrays.asList("adapter.onnx_adapter", "adapter_config.json", "adapter_model.safetensors").contains(name) || !(each.getValue() instanceof List))
                    throw new GraphoptException("host.json: adapters: expected files of adapters, found another: write it with export_hosts");
                byte[] content = read(name);
                for (Object block : (List<?>) each.getValue()) Block.put(content, object(block, "blocks of adapters"), known);
                files.put(name, content);
            }
            for (Map.Entry<String, byte[]> x : files.entrySet()) Bytes.write(new File(to, x.getKey()), x.getValue());
        }
    }

    private static void closeAll(Iterable<OnnxTensor> tensors) {
        for (OnnxTensor tensor : tensors) tensor.close();
    }

    @Override
    public void close() throws OrtException {
        isClosed = true;
        if (last != null) {
            for (Value x : state) current.remove(x.name); // the result of the last step owns them
            last.close();
        }
        closeAll(current.values());
        current.clear();
        last = null;
        OrtException first = null;
        for (OrtSession session : sessions.values())
            try {
                session.close();
            } catch (OrtException error) {
                first = first == null ? error : first;
            }
        sessions.clear();
        if (first != null) throw first;
    }
}
