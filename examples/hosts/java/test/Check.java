import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtException;
import ai.onnxruntime.OrtSession;
import graphopt.GraphoptException;
import graphopt.Provider;
import graphopt.Trainer;
import java.io.File;
import java.io.IOException;
import java.util.Map;
import java.util.TreeMap;

/**
 * Open host folders: `faults FOLDER COUNT` on providers that compute one node wrongly, alone and before the CPU;
 * `open CACHE FOLDER...` one after the other; `adapter FOLDER STATE FORM TO`; `mistakes FOLDER`. Each prints a line of what is said.
 */
public final class Check {
    /** A provider that opens `faulty-N.onnx` in place of `train.onnx`. */
    static Provider faulty(int n) {
        return new Provider("faulty", options -> {}) {
            @Override
            public OrtSession open(OrtEnvironment environment, File folder, String graph, byte[] more) throws OrtException, IOException {
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
        try {
            trainer.step(Map.of("x", x, "target", target));
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
                    for (String name : new String[] {"x", "learning_rat"})
                        try {
                            if (name.equals("x")) trainer.step(Map.of("x", new float[24]));
                            else trainer.set(name, 1);
                        } catch (GraphoptException error) {
                            System.out.println(error.getMessage());
                        }
                    try {
                        trainer.load(folder);
                    } catch (GraphoptException error) {
                        System.out.println(error.getMessage().replace(arguments[1], "FOLDER"));
                    }
                }
                break;
            default:
                throw new IllegalArgumentException(arguments[0]);
        }
    }
}
