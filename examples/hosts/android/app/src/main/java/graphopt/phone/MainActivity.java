package graphopt.phone;

import ai.onnxruntime.OrtSession.SessionOptions;
import android.app.Activity;
import android.content.ClipData;
import android.content.Intent;
import android.content.res.AssetManager;
import android.graphics.Bitmap;
import android.graphics.ImageDecoder;
import android.graphics.BitmapFactory;
import android.net.Uri;
import android.os.Build;
import android.os.Bundle;
import android.provider.MediaStore;
import android.view.View;
import android.widget.ArrayAdapter;
import android.widget.Button;
import android.widget.EditText;
import android.widget.LinearLayout;
import android.widget.ScrollView;
import android.widget.Spinner;
import android.widget.TextView;
import graphopt.Provider;
import graphopt.Trainer;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;

/** Trains a head or an adapter of a classifier on pictures of the gallery or the camera. Nothing leaves the device. */
public final class MainActivity extends Activity {
    private static final int GALLERY = 1, CAMERA = 2, ONE = 3, EPOCHS = 10;
    private static final String[] NETWORKS = {"head", "adapter"}; // folders in assets, which export.py writes
    private static final Provider[] PROVIDERS = {
        Provider.CPU,
        new Provider("xnnpack", options -> options.addXnnpack(Collections.emptyMap())),
        new Provider("nnapi", SessionOptions::addNnapi),
    };

    private final ExecutorService worker = Executors.newSingleThreadExecutor(); // the only thread that calls the trainer
    private Trainer trainer;
    private Classifier classifier;
    private String network = NETWORKS[0];
    private TextView log;
    private EditText name;
    private Spinner networks, providers;

    private interface Task {
        void run() throws Exception;
    }

    /** Runs a task on the worker; what goes wrong is a line on the screen. */
    private void work(Task task) {
        worker.execute(() -> {
            try {
                task.run();
            } catch (Exception | OutOfMemoryError error) {
                say(error);
            }
        });
    }

    private void say(Throwable error) {
        say(error.getMessage() == null ? error.toString() : error.getMessage());
    }

    private void say(String line) {
        runOnUiThread(() -> log.append(line + "\n"));
    }

    @Override
    protected void onCreate(Bundle saved) {
        super.onCreate(saved);
        LinearLayout page = new LinearLayout(this);
        page.setOrientation(LinearLayout.VERTICAL);
        page.setPadding(32, 32, 32, 32);
        page.setFitsSystemWindows(true);
        networks = spinner(NETWORKS);
        String[] names = new String[PROVIDERS.length];
        for (int i = 0; i < names.length; i++) names[i] = PROVIDERS[i].name;
        providers = spinner(names);
        name = new EditText(this);
        name.setHint(R.string.class_name);
        name.setSingleLine();
        log = new TextView(this);
        ScrollView scroll = new ScrollView(this);
        scroll.addView(log);
        for (View view : new View[] {
            networks, providers, name,
            button(R.string.gallery, () -> pick(GALLERY, true)),
            button(R.string.camera, () -> startActivityForResult(new Intent(MediaStore.ACTION_IMAGE_CAPTURE), CAMERA)),
            button(R.string.train, () -> work(this::train)),
            button(R.string.predict, () -> pick(ONE, false)),
            button(R.string.save, () -> work(this::save)),
            scroll,
        }) page.addView(view);
        setContentView(page);
    }

    private Spinner spinner(String[] items) {
        Spinner spinner = new Spinner(this);
        spinner.setAdapter(new ArrayAdapter<>(this, android.R.layout.simple_spinner_dropdown_item, items));
        return spinner;
    }

    private Button button(int text, Runnable action) {
        Button button = new Button(this);
        button.setText(text);
        button.setOnClickListener(view -> {
            try {
                action.run();
            } catch (RuntimeException error) { // a device without a camera or a gallery
                say(error);
            }
        });
        return button;
    }

    private void pick(int request, boolean isMany) {
        Intent intent = new Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("image/*");
        startActivityForResult(intent.putExtra(Intent.EXTRA_ALLOW_MULTIPLE, isMany), request);
    }

    @Override
    protected void onActivityResult(int request, int result, Intent data) {
        super.onActivityResult(request, result, data);
        if (result != RESULT_OK || data == null) return;
        String label = name.getText().toString().trim();
        if (request != ONE && label.isEmpty()) {
            say("class: expected a name, found none");
            return;
        }
        Bitmap taken = request == CAMERA && data.getExtras() != null ? (Bitmap) data.getExtras().get("data") : null;
        List<Uri> uris = new ArrayList<>();
        ClipData many = data.getClipData();
        for (int i = 0; many != null && i < many.getItemCount(); i++) uris.add(many.getItemAt(i).getUri());
        if (many == null && data.getData() != null && taken == null) uris.add(data.getData());
        String chosen = (String) networks.getSelectedItem();
        int provider = providers.getSelectedItemPosition();
        work(() -> {
            open(chosen, provider);
            if (taken != null) take(taken, request, label);
            for (Uri uri : uris) take(decoded(uri), request, label); // one at a time: a picture can have 200 MB
            if (request != ONE) say("pictures: " + classifier.counted());
        });
    }

    private void take(Bitmap picture, int request, String label) throws Exception {
        float[] numbers = classifier.numbers(pixels(picture));
        picture.recycle();
        if (request == ONE) {
            int found = classifier.predict(numbers);
            say(found < classifier.classes().size() ? classifier.classes().get(found) : "class " + found);
        } else classifier.add(label, numbers);
    }

    private Bitmap decoded(Uri uri) throws IOException {
        if (Build.VERSION.SDK_INT >= 28)
            return ImageDecoder.decodeBitmap(ImageDecoder.createSource(getContentResolver(), uri), (decoder, info, source) -> {
                decoder.setAllocator(ImageDecoder.ALLOCATOR_SOFTWARE); // whose pixels can be read
                int size = Math.min(info.getSize().getWidth(), info.getSize().getHeight());
                decoder.setTargetSampleSize(Math.max(1, size / (4 * Math.max(classifier.height, classifier.width))));
            });
        try (InputStream stream = getContentResolver().openInputStream(uri)) {
            Bitmap picture = BitmapFactory.decodeStream(stream);
            if (picture == null) throw new IOException(uri + ": expected a picture, found another file");
            return picture;
        }
    }

    /** The pixels of the largest square in the middle, in the network's size. */
    private int[] pixels(Bitmap picture) {
        int size = Math.min(picture.getWidth(), picture.getHeight());
        Bitmap square = Bitmap.createBitmap(picture, (picture.getWidth() - size) / 2, (picture.getHeight() - size) / 2, size, size);
        Bitmap scaled = Bitmap.createScaledBitmap(square, classifier.width, classifier.height, true);
        int[] pixels = new int[classifier.width * classifier.height];
        scaled.getPixels(pixels, 0, classifier.width, 0, 0, classifier.width, classifier.height);
        return pixels;
    }

    /** Opens a network on a provider, and on the CPU if that one's first step is not that of the proof. */
    private void open(String chosen, int index) throws Exception {
        if (trainer != null) return;
        File folder = new File(getFilesDir(), chosen), cache = new File(getCacheDir(), "proofs");
        copy(chosen, folder);
        Provider first = PROVIDERS[index];
        Provider[] order = index == 0 ? new Provider[] {first} : new Provider[] {first, Provider.CPU};
        Trainer opened = Trainer.open(folder, cache, Build.FINGERPRINT, order);
        try {
            classifier = new Classifier(opened);
            File saved = checkpoint(chosen), names = names(chosen);
            if (saved.isFile() && names.isFile()) {
                classifier.load(saved, names);
                say("goes on from " + saved.getName());
            }
        } catch (Throwable error) {
            opened.close();
            throw error;
        }
        trainer = opened;
        network = chosen;
        for (String line : trainer.told()) say(line);
        say(chosen + " on " + trainer.provider() + ": " + trainer.proofs());
        runOnUiThread(() -> {
            networks.setEnabled(false);
            providers.setEnabled(false);
        });
    }

    private void copy(String asset, File folder) throws IOException {
        AssetManager assets = getAssets();
        Files.createDirectories(folder.toPath());
        for (String file : assets.list(asset))
            try (InputStream stream = assets.open(asset + "/" + file)) {
                Files.copy(stream, new File(folder, file).toPath(), StandardCopyOption.REPLACE_EXISTING);
            }
    }

    private File checkpoint(String of) {
        return new File(getFilesDir(), of + ".safetensors");
    }

    private File names(String of) {
        return new File(getFilesDir(), of + ".txt");
    }

    private void train() throws Exception {
        if (trainer == null) {
            say("train: expected pictures of two classes, found none: add them");
            return;
        }
        for (int epoch = 1; epoch <= EPOCHS; epoch++) {
            double loss = classifier.epoch();
            say(String.format(Locale.ROOT, "epoch %d: loss %.3f, accuracy %.2f", epoch, loss, classifier.accuracy()));
        }
    }

    private void save() throws Exception {
        if (trainer == null) {
            say("save: expected a class, found none: add pictures");
            return;
        }
        classifier.save(checkpoint(network), names(network));
        say("saved to " + getFilesDir());
    }

    @Override
    protected void onDestroy() {
        work(() -> {
            if (trainer != null) trainer.close();
        });
        worker.shutdown();
        super.onDestroy();
    }
}
