package graphopt.phone;

import ai.onnxruntime.OrtException;
import graphopt.GraphoptException;
import graphopt.Trainer;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;

/** Pictures by classes, and training on them. It has no class of Android, so that a desktop runs it, too. */
public final class Classifier {
    private static final int BATCH = 16, FIFTH = 5; // rows of a step; one picture of so many is held out

    private final Trainer trainer;
    private final String data, target;
    private final List<String> classes = new ArrayList<>();
    private final List<float[]> pictures = new ArrayList<>(), heldOut = new ArrayList<>();
    private final List<Integer> labels = new ArrayList<>(), heldOutLabels = new ArrayList<>();
    private final Map<String, Integer> counts = new LinkedHashMap<>();
    private final Random random = new Random(0);
    public final int channels, height, width;

    /** A network of pictures [N, channels, height, width] of one feed, and class numbers. */
    public Classifier(Trainer trainer) throws GraphoptException {
        this.trainer = trainer;
        List<String> feeds = trainer.feeds();
        data = feeds.get(0);
        target = feeds.get(feeds.size() - 1);
        long[] shape = trainer.shape(data);
        if (feeds.size() != 2 || shape.length != 4 || shape[2] <= 0 || shape[3] <= 0 || (shape[1] != 1 && shape[1] != 3))
            throw new GraphoptException("feeds: expected pictures [N, 1 or 3, height, width] and classes, found " + feeds + ": export such a network");
        channels = (int) shape[1];
        height = (int) shape[2];
        width = (int) shape[3];
    }

    /** Numbers from 0 to 1 of a picture's pixels, 0xAARRGGBB, in rows. */
    public float[] numbers(int[] pixels) {
        float[] numbers = new float[channels * height * width];
        for (int i = 0; i < height * width; i++) {
            int red = pixels[i] >> 16 & 255, green = pixels[i] >> 8 & 255, blue = pixels[i] & 255;
            if (channels == 1) numbers[i] = (0.299f * red + 0.587f * green + 0.114f * blue) / 255;
            for (int c = 0; channels == 3 && c < 3; c++) numbers[c * height * width + i] = (c == 0 ? red : c == 1 ? green : blue) / 255f;
        }
        return numbers;
    }

    /** Adds a picture of a class. */
    public void add(String given, float[] numbers) throws GraphoptException {
        String name = given.replaceAll("\\p{Cntrl}", " ").trim(); // a file of names has a line for each
        if (name.isEmpty()) throw new GraphoptException("class: expected a name, found none: write one");
        if (!classes.contains(name)) {
            if (classes.size() > trainer.most(target))
                throw new GraphoptException(name + ": expected at most " + classes.size() + " classes, which the network has, found another");
            classes.add(name);
        }
        int count = counts.containsKey(name) ? counts.get(name) : 0;
        boolean isHeldOut = count % FIFTH == FIFTH - 1;
        (isHeldOut ? heldOut : pictures).add(numbers);
        (isHeldOut ? heldOutLabels : labels).add(classes.indexOf(name));
        counts.put(name, count + 1);
    }

    /** The names of classes in the order of their numbers. */
    public List<String> classes() {
        return Collections.unmodifiableList(classes);
    }

    /**
     * Writes a checkpoint and, before it, the names of its classes. Names are only added, so that those of a later moment
     * also fit the checkpoint of an earlier one, if the app is killed between the two.
     */
    public void save(File checkpoint, File names) throws GraphoptException, IOException {
        if (classes.isEmpty()) throw new GraphoptException("save: expected a class, found none: add pictures");
        File part = new File(names.getPath() + ".part");
        Files.write(part.toPath(), classes, StandardCharsets.UTF_8);
        Files.move(part.toPath(), names.toPath(), StandardCopyOption.REPLACE_EXISTING);
        trainer.save(checkpoint);
    }

    /** Goes on from what `save` has written. */
    public void load(File checkpoint, File names) throws GraphoptException, OrtException, IOException {
        List<String> known = Files.readAllLines(names.toPath(), StandardCharsets.UTF_8);
        if (known.isEmpty() || known.contains("") || known.size() - 1 > trainer.most(target))
            throw new GraphoptException(names + ": expected names of 1 to " + (long) (trainer.most(target) + 1) + " classes, found " + known + ": delete it");
        trainer.load(checkpoint);
        classes.addAll(known);
    }

    public String counted() {
        return counts.toString();
    }

    /** Trains once on each picture that is not held out, and returns the mean loss. Bad batches are left out. */
    public double epoch() throws GraphoptException, OrtException, IOException {
        if (counts.size() < 2) throw new GraphoptException("train: expected pictures of two classes, found " + counts.keySet() + ": add them");
        List<Integer> order = new ArrayList<>();
        for (int i = 0; i < pictures.size(); i++) order.add(i);
        Collections.shuffle(order, random);
        double sum = 0;
        int steps = 0;
        for (int begin = 0; begin < order.size(); begin += BATCH) {
            List<Integer> rows = order.subList(begin, Math.min(begin + BATCH, order.size()));
            try {
                sum += trainer.step(batch(rows, pictures, labels)).get("loss")[0];
                steps++;
            } catch (GraphoptException.NotFinite error) {
                System.err.println(error.getMessage());
            }
        }
        return sum / steps;
    }

    private Map<String, Object> batch(List<Integer> rows, List<float[]> from, List<Integer> classes) {
        int size = channels * height * width;
        float[] x = new float[rows.size() * size];
        long[] y = new long[rows.size()];
        for (int i = 0; i < y.length; i++) {
            System.arraycopy(from.get(rows.get(i)), 0, x, i * size, size);
            y[i] = classes.get(rows.get(i));
        }
        Map<String, Object> batch = new LinkedHashMap<>();
        batch.put(data, x);
        batch.put(target, y);
        return batch;
    }

    /** The share of held-out pictures that are classified correctly; NaN for none. */
    public double accuracy() throws GraphoptException, OrtException, IOException {
        int right = 0;
        for (int i = 0; i < heldOut.size(); i++) right += predict(heldOut.get(i)) == heldOutLabels.get(i) ? 1 : 0;
        return (double) right / heldOut.size();
    }

    /** The number of the class of a picture. */
    public int predict(float[] numbers) throws GraphoptException, OrtException, IOException {
        Map<String, Object> batch = new LinkedHashMap<>();
        batch.put(data, numbers);
        double[] scores = trainer.predict(batch).values().iterator().next();
        int best = 0;
        for (int i = 1; i < Math.min(scores.length, Math.max(classes.size(), 1)); i++) best = scores[i] > scores[best] ? i : best;
        return best;
    }
}
