import graphopt.Trainer;
import graphopt.phone.Classifier;
import java.io.File;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;

/** Trains as the app for phones does: FOLDER PIXELS LABELS EPOCHS SAVED, with raw 0xAARRGGBB of int32 and classes of int64. */
public final class Phone {
    public static void main(String[] arguments) throws Exception {
        ByteBuffer all = ByteBuffer.wrap(Files.readAllBytes(new File(arguments[1]).toPath())).order(ByteOrder.LITTLE_ENDIAN);
        ByteBuffer labels = ByteBuffer.wrap(Files.readAllBytes(new File(arguments[2]).toPath())).order(ByteOrder.LITTLE_ENDIAN);
        try (Trainer trainer = Trainer.open(new File(arguments[0]), null, "")) {
            Classifier classifier = new Classifier(trainer);
            int[] pixels = new int[classifier.height * classifier.width];
            while (labels.hasRemaining()) {
                all.asIntBuffer().get(pixels);
                all.position(all.position() + 4 * pixels.length);
                classifier.add("class " + labels.getLong(), classifier.numbers(pixels));
            }
            for (int epoch = 0; epoch < Integer.parseInt(arguments[3]); epoch++)
                System.out.println(classifier.epoch() + " " + classifier.accuracy());
            File saved = new File(arguments[4]), names = new File(arguments[4] + ".txt");
            classifier.save(saved, names);
            new Classifier(trainer).load(saved, names);
            System.err.println(trainer.proofs() + " " + classifier.counted());
        }
    }
}
