import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import graphopt.GraphoptException;
import graphopt.Provider;
import graphopt.Trainer;
import graphopt.phone.Classifier;
import java.io.File;
import java.io.IOException;
import java.nio.file.Files;
import java.util.Map;
import java.util.TreeMap;

/**
 * Open host folders: `faults FOLDER COUNT` on providers that compute one node wrongly, alone and before the CPU;
 * `open CACHE FOLDER...` one after the other; `adapter FOLDER STATE FORM TO`; `mistakes FOLDER`; `load FOLDER STATE...`, after rates;
 * `classes FOLDER SAVED` of the app for phones. Each prints a line of what is said.
 */
public final class Check {
    /** A provider that opens `faulty-N.onnx` in place of `train.onnx`. */
    static Provider faulty(int n) {
        return new Provider("faulty", options -> {}) {
            @Override
            public OrtSession open(OrtEnvironment environment, File folder, String graph, byte[] more) throws OrtException, IOException, GraphoptException {
                return super.open(environment, folder, graph.equals("train.onnx") ? "faulty-" + n + ".onnx" : graph, more);
            }
        };
    }

    static void opened(File folder, File cache, Provider... providers) throws Exception {
        try (Trainer trainer = Trainer.open(folder, cache, "", providers)) {
            System.out.println(trainer.provider() + "\t" + new TreeMap<>(trainer.proofs()) + "\t" + trainer.told());
        } catch (GraphoptException error) {
            System.out.println("error\t" + error.getMessage());
        }
    }

    static void refused(Trainer trainer, Object x, Object target) throws Exception {
        said(() -> trainer.step(Map.of("x", x, "target", target)));
    }

    interface Task {
        void run() throws Exception;
    }

    static void said(Task task) throws Exception {
        try {
            task.run();
            System.out.println("taken");
        } catch (GraphoptException error) {
            System.out.println(error.getMessage());
        }
    }

    public static void main(String[] arguments) throws Exception {
        File folder = new File(arguments[1]);
        switch (arguments[0]) {
            case "faults":
                for (int n = 0; n < Integer.parseInt(arguments[2]); n++) {
                    opened(folder, null, faulty(n));
                    opened(folder, null, faulty(n), Provider.CPU);
                }
                break;
            case "open":
                for (int i = 2; i < arguments.length; i++) opened(new File(arguments[i]), folder);
                break;
            case "adapter":
                try (Trainer trainer = Trainer.open(folder, null, "")) {
                    trainer.load(new File(arguments[2]));
                    trainer.adapter(arguments[3], new File(arguments[4]));
                } catch (GraphoptException error) {
                    System.out.println(error.getMessage());
                }
                break;
            case "mistakes":
                try (Trainer trainer = Trainer.open(folder, null, "")) {
                    long[] labels = {0, 3, 1};
                    refused(trainer, new float[24], labels);
                    refused(trainer, new float[25], labels);
                    refused(trainer, new float[16], labels);
                    refused(trainer, new float[24], new long[] {0, 4, 1});
                    refused(trainer, new float[24], new double[] {0, 0.5, 1});
                    refused(trainer, "text", labels);
                    refused(trainer, new float[0], labels);
                    said(() -> trainer.step(Map.of("x", new float[24])));
                    said(() -> trainer.set("learning_rat", 1));
                    said(() -> trainer.load(folder));
                }
                Trainer closed = Trainer.open(folder, null, "");
                closed.close();
                refused(closed, new float[24], new long[] {0, 3, 1});
                break;
            case "load":
                try (Trainer trainer = Trainer.open(folder, null, "")) {
                    for (double rate : new double[] {Double.NaN, -1, 1e300, 0.1}) said(() -> trainer.set("learning_rate", rate));
                    for (int i = 2; i < arguments.length; i++) {
                        File state = new File(arguments[i]);
                        said(() -> trainer.load(state));
                    }
                }
                break;
            case "classes":
                File saved = new File(arguments[2]), names = new File(arguments[2] + ".txt");
                try (Trainer trainer = Trainer.open(folder, null, "")) {
                    Classifier classifier = new Classifier(trainer);
                    float[] picture = new float[classifier.channels * classifier.height * classifier.width];
                    said(() -> classifier.save(saved, names));
                    said(() -> classifier.add(" \n", picture));
                    said(() -> classifier.add("a\nb", picture));
                    said(classifier::epoch);
                    said(() -> classifier.add("c", picture));
                    said(() -> classifier.save(saved, names));
                    Classifier again = new Classifier(trainer);
                    again.load(saved, names);
                    System.out.println(again.classes());
                    for (String text : new String[] {"", "\n", "a\n".repeat(11)}) {
                        Files.write(names.toPath(), text.getBytes());
                        said(() -> new Classifier(trainer).load(saved, names));
                    }
                }
                break;
            default:
                throw new IllegalArgumentException(arguments[0]);
        }
    }
}
