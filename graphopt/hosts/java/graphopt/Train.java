package graphopt;

import java.io.File;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;

/** Trains from a folder, evaluates, and saves a checkpoint. README.md says how to run it. */
public final class Train {
    private Train() {}

    public static void main(String[] arguments) throws Exception {
        if (arguments.length < 6 || !arguments[2].matches("\\d{1,9}")) {
            System.err.println("expected: HOST BATCHES STEPS SAVED CHECKPOINT|- FEED=TYPE...");
            System.exit(1);
        }
        int steps = Integer.parseInt(arguments[2]);
        Map<String, Object> all = new LinkedHashMap<>();
        for (String feed : Arrays.asList(arguments).subList(5, arguments.length)) {
            String[] parts = feed.split("=", 2);
            ByteBuffer bytes = ByteBuffer.wrap(Bytes.read(new File(arguments[1], parts[0] + ".bin"))).order(ByteOrder.LITTLE_ENDIAN);
            boolean isWhole = parts.length > 1 && parts[1].equals("int64");
            Object numbers = isWhole ? (Object) new long[bytes.remaining() / 8] : new float[bytes.remaining() / 4];
            if (isWhole) bytes.asLongBuffer().get((long[]) numbers);
            else bytes.asFloatBuffer().get((float[]) numbers);
            all.put(parts[0], numbers);
        }
        String cache = System.getProperty("graphopt.cache");
        try (Trainer trainer = Trainer.open(new File(arguments[0]), cache == null ? null : new File(cache), "")) {
            System.err.println("train: " + trainer.proofs().get("train"));
            if (!arguments[4].equals("-")) trainer.load(new File(arguments[4]));
            Map<String, Object> batch = new LinkedHashMap<>();
            for (int step = 0; step < steps; step++) {
                for (Map.Entry<String, Object> x : all.entrySet()) batch.put(x.getKey(), part(x.getValue(), step, steps));
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
        } catch (GraphoptException error) {
            System.err.println("train: " + error.getMessage());
            System.exit(1);
        }
    }

    private static Object part(Object numbers, int step, int steps) {
        if (numbers instanceof long[]) {
            int size = ((long[]) numbers).length / steps;
            return Arrays.copyOfRange((long[]) numbers, step * size, (step + 1) * size);
        }
        int size = ((float[]) numbers).length / steps;
        return Arrays.copyOfRange((float[]) numbers, step * size, (step + 1) * size);
    }
}
