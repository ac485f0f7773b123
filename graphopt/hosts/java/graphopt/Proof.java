package graphopt;

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OrtSession;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Compares what a provider computes of a batch with the sums in proof.safetensors; see graphopt/hosts/proof.py. */
final class Proof {
    private static final int COLUMNS = 4; // of a row: how much the sums of an output may differ, and its sums
    private static final int MOST = 1 << 26; // numbers of a feed

    private static final int BLOCK = 1024; // numbers that are read at once

    private Proof() {}

    /** The sums of numbers, or of their change from a start, with random signs. */
    static double[] sums(ByteBuffer numbers, OnnxJavaType type, ByteBuffer start, int count) {
        double[] sums = new double[3], x = new double[BLOCK], before = new double[BLOCK];
        for (int first = 0; first < count; first += BLOCK) {
            int size = Math.min(BLOCK, count - first);
            Numbers.read(numbers, type, first, size, x);
            if (start != null) Numbers.read(start, type, first, size, before);
            add(sums, x, before, first, size);
        }
        return sums;
    }

    private static void add(double[] sums, double[] x, double[] before, int first, int size) {
        double a = 0, b = 0, c = 0;
        for (int i = 0; i < size; i++) {
            double change = x[i] - before[i];
            int h = (first + i + 1) * 0x9E3779B1;
            h = (h ^ h >>> 15) * 0x85EBCA6B;
            h ^= h >>> 13;
            a += change * (1 - 2 * (h & 1));
            b += change * (1 - (h & 2));
            c += change * (1 - (h >> 1 & 2));
        }
        sums[0] += a;
        sums[1] += b;
        sums[2] += c;
    }

    /** A feed of the proof: numbers that repeat, in its shape. */
    static ByteBuffer feed(Bytes file, Value feed, long[] dims) throws GraphoptException {
        ByteBuffer own = file.numbers("feed." + feed.name);
        if (feed.type == null || !String.valueOf(feed.stored()).equals(file.property("feed." + feed.name, "dtype")) || own.remaining() < feed.type.size)
            throw new GraphoptException("proof.safetensors: feed " + feed.name + ": expected numbers of " + feed.kind + ", found others");
        long count = 1;
        for (long size : dims) count = size > 0 && size <= MOST / count ? count * size : MOST + 1L;
        if (count > MOST) throw new GraphoptException("proof.safetensors: feed " + feed.name + ": expected 1 to " + MOST + " numbers, found the shape " + Arrays.toString(dims));
        byte[] period = new byte[own.remaining() / feed.type.size * feed.type.size], whole = new byte[(int) count * feed.type.size];
        own.get(period);
        for (int i = 0; i < whole.length; i += period.length) System.arraycopy(period, 0, whole, i, Math.min(period.length, whole.length - i));
        return ByteBuffer.wrap(whole).order(java.nio.ByteOrder.LITTLE_ENDIAN);
    }

    static long[] shape(Bytes file, String feed) throws GraphoptException {
        ByteBuffer numbers = file.numbers("shape." + feed);
        long[] dims = new long[numbers.remaining() / 8];
        if (dims.length > 16) throw new GraphoptException("proof.safetensors: feed " + feed + ": expected at most 16 axes, found " + dims.length);
        for (int i = 0; i < dims.length; i++) dims[i] = numbers.getLong(8 * i);
        return dims;
    }

    /** The place and the line of the first output whose sums differ; null if none does. `start` is state by output. */
    static Object[] first(Bytes file, String table, List<String> outputs, OrtSession.Result found, Map<String, OnnxTensor> start)
        throws GraphoptException {
        ByteBuffer rows = file.numbers(table);
        int missing = 0;
        if (rows.remaining() != 8 * COLUMNS * outputs.size())
            throw new GraphoptException("expected " + outputs.size() + " rows of " + table + ", found " + rows.remaining() + " bytes");
        for (int r = 0; r < outputs.size(); r++) {
            String name = outputs.get(r);
            double allowed = rows.getDouble(8 * COLUMNS * r);
            OnnxTensor tensor = (OnnxTensor) found.get(name).orElseThrow(() -> new GraphoptException("expected an output " + name + ", found none"));
            OnnxTensor before = start.get(name);
            if (allowed == Double.POSITIVE_INFINITY) {
                missing += before != null ? 1 : 0;
                continue;
            }
            OnnxJavaType type = tensor.getInfo().type;
            ByteBuffer numbers = Numbers.of(tensor), old = before == null ? null : Numbers.of(before);
            if (old != null && old.remaining() != numbers.remaining())
                return new Object[] {r, name + ": expected " + old.remaining() + " bytes, found " + numbers.remaining()};
            double[] sums = sums(numbers, type, old, numbers.remaining() / type.size);
            for (int k = 0; k < 3; k++) {
                double expected = rows.getDouble(8 * (COLUMNS * r + 1 + k));
                if (!(Math.abs(sums[k] - expected) <= allowed))
                    return new Object[] {r, String.format(java.util.Locale.ROOT, "%s: expected the sum %.6g of the proof, found %.6g", name, expected, sums[k])};
            }
        }
        if (missing > 0) throw new GraphoptException("states that are not compared: " + missing);
        return null;
    }

    /** The operator and the output of the first node that differs; empty if none does alone, or it is not known. */
    static String firstNode(Trainer trainer, File debug, Map<String, OnnxTensor> given) {
        try {
            Bytes file = new Bytes(Bytes.read(debug), debug.getName());
            String[] lines = text(file, "debug.names").split("\n");
            Map<String, String> line = new LinkedHashMap<>();
            for (String each : lines) line.put(each.substring(each.indexOf(' ') + 1), each);
            ByteBuffer suffix = file.numbers("debug.graph");
            byte[] more = new byte[suffix.remaining()];
            suffix.get(more);
            List<String> outputs = new java.util.ArrayList<>(line.keySet());
            try (OrtSession session = trainer.openGraph("train", more); OrtSession.Result found = session.run(given, line.keySet())) {
                Object[] differs = first(file, "debug.numbers", outputs, found, new LinkedHashMap<>());
                return differs == null ? "" : ", first in node " + line.get(outputs.get((Integer) differs[0]));
            }
        } catch (Exception error) { // the name of a node is only help: go on without it
            return "";
        }
    }

    private static String text(Bytes file, String name) throws GraphoptException {
        return StandardCharsets.UTF_8.decode(file.numbers(name)).toString();
    }

    /** The SHA-256 of what a stream has, which is never in memory as a whole. */
    static String hash(InputStream content) throws IOException {
        try (InputStream stream = content) {
            MessageDigest digest = MessageDigest.getInstance("SHA-256");
            byte[] block = new byte[1 << 16];
            for (int count; (count = stream.read(block)) >= 0; ) digest.update(block, 0, count);
            StringBuilder hash = new StringBuilder();
            for (byte b : digest.digest()) hash.append(String.format("%02x", b));
            return hash.toString();
        } catch (NoSuchAlgorithmException error) {
            throw new IOException(error);
        }
    }

    static String hash(String text) throws IOException {
        return hash(new ByteArrayInputStream(text.getBytes(StandardCharsets.UTF_8)));
    }

    /** What Linux and Android say of the first processor, without its clock; empty if they say nothing. */
    static String processor() {
        StringBuilder told = new StringBuilder();
        try (BufferedReader lines = Files.newBufferedReader(new File("/proc/cpuinfo").toPath(), StandardCharsets.ISO_8859_1)) {
            for (String line; (line = lines.readLine()) != null && !line.isEmpty(); )
                if (!line.contains("MHz") && !line.contains("ogo")) told.append(line).append('\n');
        } catch (IOException error) { // no such file, or not for us
            return "";
        }
        return told.toString();
    }
}
