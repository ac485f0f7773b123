package graphopt;

import ai.onnxruntime.OrtException;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;

/** Trains from a folder, evaluates, and saves a checkpoint. README.md says how to run it. */
public final class Train {
    private Train() {}

    public static void main(String[] arguments) {
        if (arguments.length < 6 || !arguments[2].matches("\\d{1,9}")) {
            System.err.println("expected: HOST BATCHES STEPS SAVED CHECKPOINT|- FEED=TYPE...");
            System.exit(1);
        }
        try {
            run(arguments, Integer.parseInt(arguments[2]));
        } catch (GraphoptException | OrtException | IOException error) {
            System.err.println("train: " + String.valueOf(error.getMessage()).replaceAll("\\p{Cntrl}", " "));
            System.exit(1);
        }
    }

    private static void run(String[] arguments, int steps) throws GraphoptException, OrtException, IOException {
        Map<String, Object[]> all = new LinkedHashMap<>();
        for (String feed : Arrays.asList(arguments).subList(5, arguments.length)) {
            String[] parts = feed.split("=", 2);
            all.put(parts[0], numbers(parts[0], parts.length > 1 ? parts[1] : "none", Bytes.read(new File(arguments[1], parts[0] + ".bin")), steps));
        }
        String cache = System.getProperty("graphopt.cache");
        try (Trainer trainer = Trainer.open(new File(arguments[0]), cache == null ? null : new File(cache), "")) {
            System.err.println("train: " + trainer.proofs().get("train"));
            if (!arguments[4].equals("-")) trainer.load(new File(arguments[4]));
            Map<String, Object> batch = new LinkedHashMap<>();
            for (int step = 0; step < steps; step++) {
                for (Map.Entry<String, Object[]> x : all.entrySet()) batch.put(x.getKey(), x.getValue()[step]);
                double loss = Double.NaN;
                try {
                    loss = trainer.step(batch).get("loss")[0];
                } catch (GraphoptException.NotFinite error) { // the state is as it was before a bad batch: go on
                    System.err.println("train: " + error.getMessage());
                }
                System.out.println((float) loss);
            }
            System.out.println((float) trainer.evaluate(batch).get("loss")[0]);
            trainer.save(new File(arguments[3]));
        }
    }

    /** The numbers of each step. */
    private static Object[] numbers(String feed, String type, byte[] all, int steps) throws GraphoptException {
        int size = Arrays.asList("float32", "int32").contains(type) ? 4 : Arrays.asList("float64", "int64").contains(type) ? 8 : 0;
        if (size == 0) throw new GraphoptException(feed + ": expected float32, float64, int32 or int64, found " + type);
        if (steps == 0 || all.length % (size * (long) steps) != 0)
            throw new GraphoptException(feed + ".bin: expected as many numbers in each of " + steps + " steps, found " + all.length + " bytes of " + type);
        Object[] found = new Object[steps];
        ByteBuffer bytes = ByteBuffer.wrap(all).order(ByteOrder.LITTLE_ENDIAN);
        for (int step = 0, count = all.length / steps / size; step < steps; step++) {
            found[step] = type.equals("float32") ? new float[count] : type.equals("float64") ? new double[count] : type.equals("int32") ? new int[count] : new long[count];
            for (int i = 0; i < count; i++)
                switch (type) {
                    case "float32": ((float[]) found[step])[i] = bytes.getFloat(); break;
                    case "float64": ((double[]) found[step])[i] = bytes.getDouble(); break;
                    case "int32": ((int[]) found[step])[i] = bytes.getInt(); break;
                    default: ((long[]) found[step])[i] = bytes.getLong();
                }
        }
        return found;
    }
}
