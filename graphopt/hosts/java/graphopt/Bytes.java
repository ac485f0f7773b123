package graphopt;

import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.StandardCopyOption;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** A safetensors file: 8 bytes with the size of a header in JSON; the header; the numbers. */
final class Bytes {
    final byte[] content;
    private final String file;
    private final Map<?, ?> entries;
    private final int begin;

    Bytes(byte[] content, String name) throws GraphoptException {
        this.content = content;
        file = name;
        long length = content.length < 8 ? -1 : ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).getLong();
        if (length < 0 || length > content.length - 8)
            throw new GraphoptException(name + ": expected a safetensors file, found one that is cut or another");
        Object header = Json.read(new String(content, 8, (int) length, StandardCharsets.UTF_8), name);
        if (!(header instanceof Map)) throw new GraphoptException(name + ": expected a safetensors file, found another");
        entries = (Map<?, ?>) header;
        begin = 8 + (int) length;
    }

    /** The names of tensors. */
    Set<Object> names() {
        Set<Object> names = new LinkedHashSet<>(entries.keySet());
        names.remove("__metadata__");
        return names;
    }

    /** A property of a tensor, such as `dtype` or `shape`; null if the file has none of the name. */
    Object property(String name, String key) {
        Object entry = entries.get(name);
        return entry instanceof Map ? ((Map<?, ?>) entry).get(key) : null;
    }

    /** The numbers of a tensor, which are part of the content. */
    ByteBuffer numbers(String name) throws GraphoptException {
        Object at = property(name, "data_offsets");
        List<?> ends = at instanceof List ? (List<?>) at : null;
        if (ends != null && ends.size() == 2 && ends.get(0) instanceof Long && ends.get(1) instanceof Long) {
            long first = (Long) ends.get(0), last = (Long) ends.get(1);
            if (0 <= first && first <= last && last <= content.length - begin)
                return ((ByteBuffer) ByteBuffer.wrap(content).position(begin + (int) first).limit(begin + (int) last)).slice().order(ByteOrder.LITTLE_ENDIAN);
        }
        throw new GraphoptException(file + ": expected the numbers of '" + name + "', found none: the file is cut, or of another folder");
    }

    static byte[] read(File file) throws IOException, GraphoptException {
        if (!file.isFile()) throw new GraphoptException(file + ": expected a file, found none");
        if (file.length() > Integer.MAX_VALUE - 8)
            throw new GraphoptException(file + ": expected a file below 2 GB, found " + file.length() + " bytes: Java reads it whole");
        return Files.readAllBytes(file.toPath());
    }

    /** Writes a file, all of it or nothing. */
    static void write(File file, byte[] content) throws IOException {
        File part = new File(file.getPath() + ".part");
        try {
            Files.write(part.toPath(), content);
            Files.move(part.toPath(), file.toPath(), StandardCopyOption.REPLACE_EXISTING);
        } finally {
            Files.deleteIfExists(part.toPath());
        }
    }
}
