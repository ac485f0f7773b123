package graphopt;

import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.OrtSession.SessionOptions;
import java.io.File;
import java.io.IOException;

/** What computes graphs: ONNX Runtime's CPU provider, or others by an `Adder`. */
public class Provider {
    /** Adds a provider to the options of a session, such as `SessionOptions::addNnapi`. */
    public interface Adder {
        void add(SessionOptions options) throws OrtException;
    }

    public static final Provider CPU = new Provider("cpu", options -> {});

    public final String name;
    private final Adder adder;

    public Provider(String name, Adder adder) {
        this.name = name;
        this.adder = adder;
    }

    /** Opens a graph of a folder, which `more` bytes of a message follow, if there are any. */
    public OrtSession open(OrtEnvironment environment, File folder, String graph, byte[] more) throws OrtException, IOException, GraphoptException {
        try (SessionOptions options = new SessionOptions()) {
            if (Trainer.minor(environment.getVersion()) < 19) options.setMemoryPatternOptimization(false); // such plans may overlap
            adder.add(options);
            File file = new File(folder, graph);
            if (more.length == 0) return environment.createSession(file.getPath(), options);
            options.addConfigEntry("session.model_external_initializers_file_folder_path", folder.getPath());
            byte[] content = Bytes.read(file), whole = java.util.Arrays.copyOf(content, content.length + more.length);
            System.arraycopy(more, 0, whole, content.length, more.length);
            return environment.createSession(whole, options);
        }
    }
}
